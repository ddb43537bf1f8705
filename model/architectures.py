"""What transformers' GPT-2, GPT-NeoX and Llama have for our switches, fields and modules.

One `Architecture` per class holds all that differs: the switches it has, what it calls our fields,
and what it calls our modules and how their rows are laid out there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig


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
    head_in_files: str = "lm_head"
    """What files call the output head, which is lm_head in every class."""


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
    head_in_files="embed_out",
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
