"""What each block keeps for its backward pass, and the grammar that names blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

from configs.reading import ConfigError
from configs.schema import ActivationCheckpointing, Blocks

Policy = Literal["none", "selective", "full", "offload"]
"""
none       everything that autograd saves
selective  results of matrix products and of fused attention; norms, the MLP's activation function
           and rotary positions are computed again
full       the block's input; its forward pass is computed again
offload    as full, with that input in pinned host memory until backward needs it
"""

GRAMMAR = "all, first-N, last-N, middle-N, range-I-J (J excluded), every-K or a list of numbers"


def block_policies(
    settings: ActivationCheckpointing, layers: int, device: str
) -> tuple[Policy, ...]:
    """The policy of each block; a block that no policy names is "none".

    Raises:
        ConfigError: all blocks that do not exist or are named twice, and offload from a CPU.
    """
    assert settings.policies != "auto", "memory/fit.py chooses those"
    chosen: dict[int, Policy] = {}
    problems: list[str] = []
    if device == "cpu" and "offload" in settings.policies:
        problems.append(
            "activation_checkpointing.policies.offload: a CPU's activations are in host memory "
            'already; use "full"'
        )
    for policy, blocks in settings.policies.items():
        key = f"activation_checkpointing.policies.{policy}"
        try:
            numbers = named_blocks(blocks, layers)
        except ValueError as error:
            problems.append(f"{key}: {error}")
            continue
        for number in numbers:
            if number in chosen:
                problems.append(f"{key}: block {number} is {chosen[number]!r} already")
            chosen[number] = policy
    if problems:
        raise ConfigError(problems)
    return tuple(chosen.get(number, "none") for number in range(layers))


def describe_policies(policies: Sequence[Policy]) -> str:
    """Such as "full: 0-9, 12; none: 10-11"."""
    blocks: dict[Policy, list[str]] = {}
    for policy, run in groupby(range(len(policies)), key=policies.__getitem__):
        numbers = list(run)
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        blocks.setdefault(policy, []).append(span)
    return "; ".join(f"{policy}: {', '.join(spans)}" for policy, spans in blocks.items())


def as_names(policies: Sequence[Policy]) -> dict[Policy, Blocks]:
    """The "policies" of a config that says the same; "none" goes without saying."""
    names: dict[Policy, Blocks] = {}
    for policy in ("selective", "full", "offload"):
        numbers = [number for number, own in enumerate(policies) if own == policy]
        if not numbers:
            continue
        start, end = numbers[0], numbers[-1] + 1
        if numbers != list(range(start, end)):
            names[policy] = numbers
        elif len(numbers) == len(policies):
            names[policy] = "all"
        else:
            names[policy] = f"range-{start}-{end}"
    return names


def named_blocks(blocks: Blocks, layers: int) -> Iterable[int]:
    """The block numbers that a name such as "last-2" stands for in a model of `layers` blocks.

    Raises:
        ValueError: the name is not in the grammar, or a number in it is outside the model.
    """
    if isinstance(blocks, list):
        outside = [number for number in blocks if not 0 <= number < layers]
        if outside:
            raise ValueError(f"block {outside[0]} does not exist; blocks are 0 to {layers - 1}")
        return blocks
    if blocks == "all":
        return range(layers)
    match = re.fullmatch(r"(first|last|middle|every)-(\d+)|(range)-(\d+)-(\d+)", blocks)
    if match is None:
        raise ValueError(f"{blocks!r} names no blocks; expected {GRAMMAR}")
    if match[3]:
        start, end = int(match[4]), int(match[5])
        if not start < end <= layers:
            raise ValueError(f"{blocks!r}: expected 0 <= I < J <= {layers}, the number of blocks")
        return range(start, end)
    kind, number = match[1], int(match[2])
    if not 0 < number <= layers:
        raise ValueError(f"{blocks!r}: expected a number from 1 to {layers}, the number of blocks")
    if kind == "every":
        return range(0, layers, number)
    start = {"first": 0, "last": layers - number, "middle": (layers - number) // 2}[kind]
    return range(start, start + number)
