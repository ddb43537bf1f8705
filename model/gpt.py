"""The GPT: norms, rotary positions, attention, MLP, block, model, initialisation.

It knows nothing of ranks, DeepSpeed, data or memory policies. `GPT.run_block` is the one seam: a
policy (activation checkpointing, profiling) replaces that callable and every parameter keeps its
name. Shapes are written [batch, time, width]; heads come before time inside attention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.documents import Attend, attention_within, document_numbers, positions_within
from model.loss import LossMethod, next_token_loss, padding_bias

# Cosines and sines, each [time, rotary width / 2]; [batch, ...] where rows have own positions.
Rotary = tuple[Tensor, Tensor]


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_epsilon)
    return nn.LayerNorm(width, eps=config.norm_epsilon, bias=config.biases)


def rotary_tables(config: ModelConfig, positions: Tensor) -> Rotary:
    """Angles position / base^(2i / rotary width), as in RoFormer (arXiv 2104.09864, section 3.2).

    Always from float32: bfloat16 cannot tell position 257 from 256.
    """
    pairs = torch.arange(0, config.rotary_width, 2, device=positions.device)
    frequencies = config.rotary_base ** (-pairs.float() / config.rotary_width)
    angles = positions.float()[..., None] * frequencies  # [time, rotary width / 2]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the leading channels of x [batch, time, heads, head width], paired (i, i + half)."""
    cos, sin = (table[..., None, :] for table in rotary)  # [time, 1, rotary width / 2]
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """q [batch, heads, time, head width]; k and v may have fewer heads (grouped queries)."""
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped
    )


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, config.qkv_width, bias=config.biases)
        self.output = nn.Linear(config.width, config.width, bias=config.biases)
        if config.qk_norm:
            self.query_norm = make_norm(config, config.head_width)
            self.key_norm = make_norm(config, config.head_width)

    def forward(self, x: Tensor, rotary: Rotary | None, attend: Attend) -> Tensor:
        # Heads are counted in the projection: it may hold a share of them (model/partition.py).
        qkv = self.qkv(x).unflatten(-1, (-1, self.config.head_width))
        group = self.config.heads // self.config.kv_heads  # query heads per key and value head
        kv_heads = qkv.shape[2] // (group + 2)
        q, k, v = qkv.split([group * kv_heads, kv_heads, kv_heads], dim=2)
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        dropout = self.config.dropout if self.training else 0.0
        # Time before heads in memory until here: the result then needs no copy to be joined.
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = attend(q, k, v, dropout)  # [batch, heads, time, head width]
        return self.output(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        self.up = nn.Linear(config.width, config.up_width, bias=config.biases)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)  # [batch, time, up width]
        if self.kind == "swiglu":
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        elif self.kind == "relu_squared":
            hidden = F.relu(hidden).square()
        else:
            hidden = F.gelu(hidden, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        return self.down(hidden)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.dropout = config.dropout
        self.attention_norm = make_norm(config, config.width)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config, config.width)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rotary: Rotary | None = None, attend: Attend = causal_attention
    ) -> Tensor:
        attention = self.drop(self.attention(self.attention_norm(x), rotary, attend))
        if self.parallel:
            return x + attention + self.drop(self.mlp(self.mlp_norm(x)))
        x = x + attention
        return x + self.drop(self.mlp(self.mlp_norm(x)))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Head(nn.Module):
    """Output projection: logits without targets, the mean next-token loss with them."""

    def __init__(self, config: ModelConfig, loss: LossMethod, z_loss: float) -> None:
        super().__init__()
        self.vocabulary_size = config.vocabulary_size
        self.loss = loss
        self.z_loss = z_loss
        self.weight: Tensor = nn.Parameter(torch.empty(config.padded_vocabulary_size, config.width))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return F.linear(x, self.weight, padding_bias(self.weight, self.vocabulary_size))
        return next_token_loss(
            x.flatten(0, 1),
            self.weight,
            targets.flatten(),
            vocabulary_size=self.vocabulary_size,
            method=self.loss,
            z_loss=self.z_loss if self.training else 0.0,
        )


class Context(NamedTuple):
    """What the blocks of one forward pass share, in the order in which a block takes it."""

    rotary: Rotary | None
    attend: Attend = causal_attention


def run_block(index: int, block: nn.Module, x: Tensor, context: Context) -> Tensor:
    """The default runner of the block loop: a plain call."""
    return block(x, *context)


class GPT(nn.Module):
    """A decoder-only transformer.

    Called with tokens [batch, time] it returns logits [batch, time, padded vocabulary]; called with
    targets of the same shape as well, the mean loss of predicting targets (already shifted by the
    data loader: targets[:, t] is the token after tokens[:, t]).

    With a `separator`, the id of the token between documents, tokens see their own document only
    (model/documents.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        loss: LossMethod = "auto",
        z_loss: float = 0.0,
        separator: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.separator = separator
        self.run_block: Callable[[int, nn.Module, Tensor, Context], Tensor] = run_block
        self.attention_within: Callable[[Tensor, Tensor, int], Attend] = attention_within
        self.token_embedding = nn.Embedding(config.padded_vocabulary_size, config.width)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.max_sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = make_norm(config, config.width)
        self.head = Head(config, loss, z_loss)
        self.tie_embeddings()

    def tie_embeddings(self) -> None:
        if self.config.tied_embeddings:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x, context = self.begin(tokens)
        for index, block in enumerate(self.blocks):
            x = self.run_block(index, block, x, context)
        return self.head(self.final_norm(x), targets)

    def begin(self, tokens: Tensor) -> tuple[Tensor, Context]:
        """Embeddings [batch, time, width] of whole rows; what the blocks share."""
        if self.separator is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x, rotary = self.embed(tokens, positions)
            return x, Context(rotary)
        documents = document_numbers(tokens, self.separator)
        x, rotary = self.embed(tokens, positions_within(documents))
        return x, Context(rotary, self.attention_within(documents, x, self.config.head_width))

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotary | None]:
        """Embeddings [batch, time, width] of tokens at `positions`; rotary tables.

        Positions are [time], or [batch, time].
        """
        time, longest = tokens.shape[1], self.config.max_sequence_length
        if time > longest:
            raise ValueError(f"a sequence of {time} tokens is longer than {longest}")
        x = self.token_embedding(tokens)
        rotary = None
        if self.config.position == "learned":
            x = x + self.position_embedding(positions)
        else:
            cos, sin = rotary_tables(self.config, positions)
            rotary = cos.to(x.dtype), sin.to(x.dtype)  # once: blocks would keep copies of their own
        return F.dropout(x, self.config.dropout, self.training), rotary


class Rule(NamedTuple):
    """How one parameter starts, and whether weight decay applies to it."""

    start: str  # "ones", "zeros" or "normal"
    std: float
    decay: bool


def parameter_rules(model: GPT, *, decay_embeddings: bool = True) -> dict[str, Rule]:
    """Every parameter's rule by name, a tied matrix once, under its embedding's name.

    GPT-2's initialisation: N(0, std) for matrices, and std / sqrt(2 layers) for the two projections
    of each block that add to the residual stream, so that its variance does not grow with depth.
    Norms and biases never decay.
    """
    std = model.config.init_std
    residual_std = std / (2 * model.config.layers) ** 0.5
    rules: dict[str, Rule] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                rule = Rule("ones" if kind == "weight" else "zeros", 0.0, False)
            elif kind == "bias":
                rule = Rule("zeros", 0.0, False)
            elif isinstance(module, nn.Embedding):
                rule = Rule("normal", std, decay_embeddings)
            elif module_name.endswith((".attention.output", ".mlp.down")):
                rule = Rule("normal", residual_std, True)
            else:
                assert isinstance(module, nn.Linear | Head), f"no rule for {module_name}.{kind}"
                rule = Rule("normal", std, True)
            rules[f"{module_name}.{kind}"] = rule
    assert rules.keys() == dict(model.named_parameters()).keys()
    return rules


def parameter_groups(
    model: GPT, *, weight_decay: float, decay_embeddings: bool
) -> list[dict[str, Any]]:
    """Two optimizer groups, with and without weight decay; each parameter is in exactly one."""
    rules = parameter_rules(model, decay_embeddings=decay_embeddings)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in model.named_parameters() if rules[name].decay == decays]}
        | {"weight_decay": weight_decay if decays else 0.0}
        for decays in (True, False)
    ]
    assert sum(len(group["params"]) for group in groups) == len(rules)
    return groups


@torch.no_grad()
def initialise(
    model: GPT, seed: int, gather: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Fill every parameter by its rule.

    Each draws from a generator of its own, seeded by (seed, name): its values do not depend on the
    order of construction, the rank, or how parameters are partitioned. `gather` makes a partitioned
    parameter whole while it is written.
    """
    rules = parameter_rules(model)
    for name, parameter in model.named_parameters():
        start, std, _ = rules[name]
        with gather(parameter):
            parameter.fill_(1.0 if start == "ones" else 0.0)
            if start == "normal":
                digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
                generator = torch.Generator(parameter.device)
                generator.manual_seed(int.from_bytes(digest, "big"))
                padded = name in ("token_embedding.weight", "head.weight")
                rows = model.config.vocabulary_size if padded else parameter.shape[0]
                parameter[:rows].normal_(0.0, std, generator=generator)


def build(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    loss: LossMethod = "auto",
    z_loss: float = 0.0,
    separator: int | None = None,
) -> GPT:
    """A GPT laid out on the meta device, then allocated once, in its final place and dtype."""
    with torch.device("meta"):
        model = GPT(config, loss=loss, z_loss=z_loss, separator=separator)
    model = model.to(dtype).to_empty(device=device)
    model.tie_embeddings()  # to_empty gives each module a tensor of its own
    initialise(model, seed)
    return model
