"""Weights and configurations to and from transformers' GPT-2, GPT-NeoX and Llama.

One `Architecture` per class holds all that differs: the switches it has, what it calls our fields,
and what it calls our modules and how their rows are laid out there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.gpt import GPT

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Layout(NamedTuple):
    """How one of our tensors becomes theirs, and the way back; weights and biases alike."""

    to_theirs: Callable[[ModelConfig, Tensor], Sequence[Tensor]]
    to_ours: Callable[[ModelConfig, Sequence[Tensor]], Tensor]


def _per_head(config: ModelConfig, tensor: Tensor) -> list[Tensor]:
    """[3 x heads x head width, ...] -> [heads x 3 x head width, ...]."""
    parts = tensor.unflatten(0, (3, config.heads, config.head_width))
    return [parts.transpose(0, 1).flatten(0, 2)]


def _from_per_head(config: ModelConfig, tensors: Sequence[Tensor]) -> Tensor:
    parts = tensors[0].unflatten(0, (config.heads, 3, config.head_width))
    return parts.transpose(0, 1).flatten(0, 2)


def _split_qkv(config: ModelConfig, tensor: Tensor) -> Sequence[Tensor]:
    heads, kv_heads = config.heads, config.kv_heads
    return tensor.split([n * config.head_width for n in (heads, kv_heads, kv_heads)])


def _pad_vocabulary(config: ModelConfig, tensors: Sequence[Tensor]) -> Tensor:
    return F.pad(tensors[0], (0, 0, 0, config.padded_vocabulary_size - config.vocabulary_size))


SAME = Layout(lambda _, tensor: [tensor], lambda _, tensors: tensors[0])
VOCABULARY = Layout(lambda config, tensor: [tensor[: config.vocabulary_size]], _pad_vocabulary)
# GPT-2's Conv1D keeps [in, out]; t() leaves a bias as it is.
TRANSPOSED = Layout(lambda _, tensor: [tensor.t()], lambda _, tensors: tensors[0].t())
PER_HEAD = Layout(_per_head, _from_per_head)
QKV = Layout(_split_qkv, lambda _, tensors: torch.cat(list(tensors)))
GATE_UP = Layout(lambda _, tensor: tensor.chunk(2), lambda _, tensors: torch.cat(list(tensors)))


class Architecture(NamedTuple):
    model_type: str
    class_name: str
    preset: str
    switches: dict[str, tuple[Any, ...]]
    """The values it can express of each of our switches, where not all."""
    fields: dict[str, str]
    """Its field -> ours of equal value; several of its fields may be one of ours."""
    fixed: dict[str, Any]
    """Its fields that we have nothing for, with the only value we can import."""
    modules: dict[str, tuple[Layout, tuple[str, ...]]]
    """Our module -> layout and its modules; * is the block's number."""


# gelu_fast and gelu_pytorch_tanh are other implementations of gelu_new's formula.
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu_squared": "relu2", "swiglu": "silu"}
MLP_KINDS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
MLP_KINDS |= {"gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "swiglu"}

UNGATED = ("gelu", "gelu_tanh", "relu_squared")

GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    preset="gpt2",
    switches={
        "norm": ("layernorm",),
        "position": ("learned",),
        "mlp": UNGATED,
        "parallel_residual": (False,),
        "biases": (True,),
        "kv_heads": ("heads",),
        "qk_norm": (False,),
    },
    fields={
        "n_layer": "layers",
        "n_embd": "width",
        "n_head": "heads",
        "n_inner": "mlp_width",
        "vocab_size": "vocabulary_size",
        "n_positions": "max_sequence_length",
        "layer_norm_epsilon": "norm_epsilon",
        "activation_function": "mlp",
        "tie_word_embeddings": "tied_embeddings",
        "embd_pdrop": "dropout",
        "attn_pdrop": "dropout",
        "resid_pdrop": "dropout",
        "initializer_range": "init_std",
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    modules={
        "token_embedding": (VOCABULARY, ("transformer.wte",)),
        "position_embedding": (SAME, ("transformer.wpe",)),
        "blocks.*.attention_norm": (SAME, ("transformer.h.*.ln_1",)),
        "blocks.*.attention.qkv": (TRANSPOSED, ("transformer.h.*.attn.c_attn",)),
        "blocks.*.attention.output": (TRANSPOSED, ("transformer.h.*.attn.c_proj",)),
        "blocks.*.mlp_norm": (SAME, ("transformer.h.*.ln_2",)),
        "blocks.*.mlp.up": (TRANSPOSED, ("transformer.h.*.mlp.c_fc",)),
        "blocks.*.mlp.down": (TRANSPOSED, ("transformer.h.*.mlp.c_proj",)),
        "final_norm": (SAME, ("transformer.ln_f",)),
        "head": (VOCABULARY, ("lm_head",)),
    },
)

NEOX = Architecture(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    preset="neox",
    switches={
        "norm": ("layernorm",),
        "position": ("rope",),
        "mlp": UNGATED,
        "biases": (True,),
        "kv_heads": ("heads",),
        "qk_norm": (False,),
    },
    fields={
        "num_hidden_layers": "layers",
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "intermediate_size": "mlp_width",
        "vocab_size": "vocabulary_size",
        "max_position_embeddings": "max_sequence_length",
        "layer_norm_eps": "norm_epsilon",
        "hidden_act": "mlp",
        "use_parallel_residual": "parallel_residual",
        "attention_bias": "biases",
        "tie_word_embeddings": "tied_embeddings",
        "attention_dropout": "dropout",
        "hidden_dropout": "dropout",
        "initializer_range": "init_std",
    },
    fixed={},
    modules={
        "token_embedding": (VOCABULARY, ("gpt_neox.embed_in",)),
        "blocks.*.attention_norm": (SAME, ("gpt_neox.layers.*.input_layernorm",)),
        "blocks.*.attention.qkv": (PER_HEAD, ("gpt_neox.layers.*.attention.query_key_value",)),
        "blocks.*.attention.output": (SAME, ("gpt_neox.layers.*.attention.dense",)),
        "blocks.*.mlp_norm": (SAME, ("gpt_neox.layers.*.post_attention_layernorm",)),
        "blocks.*.mlp.up": (SAME, ("gpt_neox.layers.*.mlp.dense_h_to_4h",)),
        "blocks.*.mlp.down": (SAME, ("gpt_neox.layers.*.mlp.dense_4h_to_h",)),
        "final_norm": (SAME, ("gpt_neox.final_layer_norm",)),
        "head": (VOCABULARY, ("lm_head",)),
    },
)

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    preset="llama",
    switches={
        "norm": ("rmsnorm",),
        "position": ("rope",),
        "rotary_fraction": (1.0,),
        "mlp": ("swiglu",),
        "parallel_residual": (False,),
        "qk_norm": (False,),
    },
    fields={
        "num_hidden_layers": "layers",
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_width",
        "intermediate_size": "mlp_width",
        "vocab_size": "vocabulary_size",
        "max_position_embeddings": "max_sequence_length",
        "rms_norm_eps": "norm_epsilon",
        "hidden_act": "mlp",
        "attention_bias": "biases",
        "mlp_bias": "biases",
        "tie_word_embeddings": "tied_embeddings",
        "attention_dropout": "dropout",
        "initializer_range": "init_std",
    },
    fixed={},
    modules={
        "token_embedding": (VOCABULARY, ("model.embed_tokens",)),
        "blocks.*.attention_norm": (SAME, ("model.layers.*.input_layernorm",)),
        "blocks.*.attention.qkv": (
            QKV,
            tuple(f"model.layers.*.self_attn.{part}_proj" for part in "qkv"),
        ),
        "blocks.*.attention.output": (SAME, ("model.layers.*.self_attn.o_proj",)),
        "blocks.*.mlp_norm": (SAME, ("model.layers.*.post_attention_layernorm",)),
        "blocks.*.mlp.up": (
            GATE_UP,
            ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
        ),
        "blocks.*.mlp.down": (SAME, ("model.layers.*.mlp.down_proj",)),
        "final_norm": (SAME, ("model.norm",)),
        "head": (VOCABULARY, ("lm_head",)),
    },
)

ARCHITECTURES = (GPT2, NEOX, LLAMA)


def to_transformers_config(config: ModelConfig) -> PretrainedConfig:
    """The configuration of the transformers class that computes the same function.

    Dropout does not belong to that function; Llama has it on attention weights only.
    """
    from transformers import AutoConfig

    architecture = _architecture_of(config)
    values = {
        theirs: ACTIVATIONS[config.mlp] if ours == "mlp" else getattr(config, ours)
        for theirs, ours in architecture.fields.items()
    }
    if config.position == "rope":
        values["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_fraction,
        }
    return AutoConfig.for_model(
        architecture.model_type,
        architectures=[architecture.class_name],
        # Their defaults are ids of tokenizers that are not ours, often beyond the vocabulary.
        bos_token_id=None,
        eos_token_id=None,
        **values,
    )


def from_transformers_config(hf_config: PretrainedConfig) -> ModelConfig:
    """Our configuration of a transformers GPT-2, GPT-NeoX or Llama; the inverse of the above."""
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    if hf_config.model_type not in by_type:
        known = ", ".join(by_type)
        raise ValueError(f"cannot import model_type={hf_config.model_type!r}, only {known}")
    architecture = by_type[hf_config.model_type]
    problems = [
        f"{name}={getattr(hf_config, name)} (only {needed} can be imported)"
        for name, needed in architecture.fixed.items()
        if getattr(hf_config, name) != needed
    ]
    values: dict[str, Any] = {"preset": architecture.preset}
    for theirs, ours in architecture.fields.items():
        value = getattr(hf_config, theirs)
        if ours == "mlp":
            if value not in MLP_KINDS:
                problems.append(f"{theirs}={value!r} (known: {', '.join(MLP_KINDS)})")
            value = MLP_KINDS.get(value)
        if value is not None and values.setdefault(ours, value) != value:
            problems.append(f"{theirs}={value} (differs from another field; {ours} is one for all)")
    head_width = values.pop("head_width", hf_config.hidden_size // hf_config.num_attention_heads)
    if head_width * hf_config.num_attention_heads != hf_config.hidden_size:
        problems.append(f"head_dim={head_width} (must be hidden_size / num_attention_heads)")
    if rope := getattr(hf_config, "rope_parameters", None):
        if rope["rope_type"] != "default":
            problems.append(f"rope_type={rope['rope_type']!r} (only 'default' can be imported)")
        values["rotary_base"] = rope["rope_theta"]
        values["rotary_fraction"] = rope.get("partial_rotary_factor", 1.0)
    if problems:
        raise ValueError(f"cannot import {architecture.class_name}: {'; '.join(problems)}")
    config = ModelConfig(**values)
    _architecture_of(config)
    return config


def export_state_dict(model: GPT) -> dict[str, Tensor]:
    """The weights under transformers' names, without vocabulary padding.

    A tied matrix is there once, as the embedding, like in the files that transformers writes.
    Tensors may be views of the model's own.
    """
    config = model.config
    architecture = _architecture_of(config)
    exported: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if config.tied_embeddings and name == "head.weight":
            continue
        layout, theirs = _counterpart(architecture, name)
        parts = layout.to_theirs(config, tensor)
        exported |= {t: part.contiguous() for t, part in zip(theirs, parts, strict=True)}
    return exported


def import_state_dict(config: ModelConfig, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' `model.state_dict()` under our names, with rows of zeros as padding.

    Complete for `GPT.load_state_dict`: a tied matrix is there under both of its names.
    """
    architecture = _architecture_of(config)
    with torch.device("meta"):
        expected = GPT(config).state_dict()
    unused = dict(state_dict)
    imported: dict[str, Tensor] = {}
    for name, blank in expected.items():
        if config.tied_embeddings and name == "head.weight":
            unused.pop("lm_head.weight", None)
            imported[name] = imported["token_embedding.weight"]
            continue
        layout, theirs = _counterpart(architecture, name)
        if missing := [t for t in theirs if t not in unused]:
            raise ValueError(f"the {architecture.class_name} weights lack {', '.join(missing)}")
        tensor = layout.to_ours(config, [unused.pop(t) for t in theirs]).contiguous()
        if tensor.shape != blank.shape:
            found, needed = list(tensor.shape), list(blank.shape)
            raise ValueError(f"{', '.join(theirs)}: {name} would be {found}, not {needed}")
        imported[name] = tensor
    if unused:
        raise ValueError(f"weights that {architecture.class_name} does not have: {sorted(unused)}")
    return imported


def _architecture_of(config: ModelConfig) -> Architecture:
    """The class that expresses every switch, or a ValueError naming those of the nearest."""
    facts = config.model_dump()
    if config.kv_heads == config.heads:
        facts["kv_heads"] = "heads"

    def differences(architecture: Architecture) -> list[str]:
        allowed = architecture.switches
        return [f"{name}={facts[name]!r}" for name in allowed if facts[name] not in allowed[name]]

    nearest = min(ARCHITECTURES, key=lambda architecture: len(differences(architecture)))
    if different := differences(nearest):
        raise ValueError(
            f"no transformers class expresses this model: {nearest.class_name} comes nearest, "
            f"but cannot have {', '.join(different)}"
        )
    return nearest


def _counterpart(architecture: Architecture, name: str) -> tuple[Layout, tuple[str, ...]]:
    """Layout of one of our parameters and its names in transformers."""
    module, _, kind = name.rpartition(".")  # kind: "weight" or "bias"
    number = "".join(re.findall(r"\d+", module))
    layout, theirs = architecture.modules[re.sub(r"\d+", "*", module)]
    return layout, tuple(f"{t.replace('*', number)}.{kind}" for t in theirs)
