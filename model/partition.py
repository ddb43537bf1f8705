"""How a block's linear layers are cut into equal parts that compute independently.

Cut by columns (output features), a layer gives each part its share of the heads or of the hidden
channels; the layer after it is cut by rows (input features) the same way, and the parts' outputs
add up: Megatron-LM's scheme (arXiv 1909.08053, section 3). Who computes which part is not the
model's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig


class Cut(NamedTuple):
    """One linear layer's cut. A bias is cut with columns, and held whole beside rows."""

    by: Literal["columns", "rows"]
    fused: tuple[int, ...] = ()
    """Output widths of the projections that one weight holds; each is cut by itself."""


def cuts(config: ModelConfig) -> dict[str, Cut]:
    """The layers that are cut, by their names within a block. All else is held whole."""
    queries, keys = config.width, config.kv_heads * config.head_width
    halves = config.up_width // config.mlp_width  # swiglu: gate and value
    return {
        "attention.qkv": Cut("columns", (queries, keys, keys)),
        "attention.output": Cut("rows"),
        "mlp.up": Cut("columns", (config.mlp_width,) * halves),
        "mlp.down": Cut("rows"),
    }


def summed_parameters(config: ModelConfig) -> list[str]:
    """Held whole but applied to a part's own heads: their gradient is a sum over the parts."""
    norms = ("attention.query_norm", "attention.key_norm") if config.qk_norm else ()
    affine = ("weight", "bias") if config.norm == "layernorm" and config.biases else ("weight",)
    return [f"{norm}.{kind}" for norm in norms for kind in affine]


def join(config: ModelConfig, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole weights, by name, of a model's parts."""
    table = cuts(config)
    joined = {}
    for name, first in parts[0].items():
        layer, _, kind = name.rpartition(".")
        cut = table.get(".".join(layer.split(".")[2:]))  # blocks.3.mlp.up -> mlp.up
        if cut is None or (cut.by == "rows" and kind == "bias"):
            joined[name] = first  # the other parts need not have it
            continue
        tensors = [part[name] for part in parts]
        if cut.by == "rows":
            joined[name] = torch.cat(tensors, dim=1)
        else:
            widths = [width // len(parts) for width in cut.fused]
            shares = zip(*(tensor.split(widths) for tensor in tensors), strict=True)
            joined[name] = torch.cat([tensor for share in shares for tensor in share])
    return joined
