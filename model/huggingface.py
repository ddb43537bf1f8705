"""Weights and configurations to and from transformers' GPT-2, GPT-NeoX and Llama."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.architectures import ACTIVATIONS, ARCHITECTURES, MLP_KINDS, Architecture, Layout
from model.config import ModelConfig
from model.gpt import GPT

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def to_transformers_config(config: ModelConfig) -> PretrainedConfig:
    """The configuration of the transformers class that computes the same function.

    Dropout does not belong to that function; Llama has it on attention weights only.
    """
    from transformers import AutoConfig

    architecture = architecture_of(config)
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
    architecture_of(config)
    return config


def export_tensor(config: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One of our parameters under transformers' names, without vocabulary padding.

    A tied matrix goes by its embedding's name. Tensors may be views of the one given.
    """
    layout, theirs = _counterpart(architecture_of(config), name)
    return dict(zip(theirs, layout.to_theirs(config, tensor), strict=True))


def import_tensor(config: ModelConfig, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """The inverse: `read` gives transformers' tensors by name; rows of zeros are the padding."""
    layout, theirs = _counterpart(architecture_of(config), name)
    return layout.to_ours(config, [read(t) for t in theirs]).contiguous()


def expected_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The shapes of transformers' parameters by name, a tied matrix once, as the embedding."""
    with torch.device("meta"):
        model = GPT(config)
    return {name: tensor.shape for name, tensor in export_state_dict(model).items()}


def export_state_dict(model: GPT) -> dict[str, Tensor]:
    """The weights under transformers' names, without vocabulary padding.

    A tied matrix is there once, as the embedding, like in the files that transformers writes.
    Tensors may be views of the model's own.
    """
    exported: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not (model.config.tied_embeddings and name == "head.weight"):
            parts = export_tensor(model.config, name, tensor)
            exported |= {theirs: part.contiguous() for theirs, part in parts.items()}
    return exported


def import_state_dict(config: ModelConfig, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' `model.state_dict()` under our names, with rows of zeros as padding.

    Complete for `GPT.load_state_dict`: a tied matrix is there under both of its names.

    Raises:
        ValueError: see `require_shapes`.
    """
    require_shapes(config, {name: tensor.shape for name, tensor in state_dict.items()})
    with torch.device("meta"):
        names = GPT(config).state_dict()
    imported: dict[str, Tensor] = {}
    for name in names:
        if config.tied_embeddings and name == "head.weight":
            imported[name] = imported["token_embedding.weight"]
        else:
            imported[name] = import_tensor(config, name, state_dict.__getitem__)
    return imported


def require_shapes(config: ModelConfig, found: Mapping[str, Sequence[int]]) -> None:
    """See that transformers' weights of these names and shapes are a model of this configuration.

    Raises:
        ValueError: naming what is missing, what is too much, or the first shape that differs.
    """
    class_name, expected = architecture_of(config).class_name, expected_shapes(config)
    optional = {"lm_head.weight"} if config.tied_embeddings else set()
    if missing := expected.keys() - found.keys():
        raise ValueError(f"the {class_name} weights lack {', '.join(sorted(missing))}")
    if surplus := found.keys() - expected.keys() - optional:
        raise ValueError(f"weights that {class_name} does not have: {sorted(surplus)}")
    for name, shape in expected.items():
        if list(found[name]) != list(shape):
            raise ValueError(f"{name}: its shape is {list(found[name])}, not {list(shape)}")


def architecture_of(config: ModelConfig) -> Architecture:
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
