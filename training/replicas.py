"""Whether the ranks that hold the same weights still do, to the bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from training.engine import Ranks

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicasDiffer(Exception):
    """Data-parallel ranks have different weights: which, and from which tensor on."""


def check_replicas(engine: Any, ranks: Ranks, step: int) -> None:
    """A collective call, on weights that every data-parallel rank holds whole.

    Raises:
        ReplicasDiffer: on all ranks.
    """
    named = list(engine.module.named_parameters())
    own = torch.stack([digest(parameter) for _, parameter in named])
    gathered = [torch.empty_like(own) for _ in range(ranks.world_size)]
    torch.distributed.all_gather(gathered, own)
    table = torch.stack(gathered).tolist()
    # Ranks of one place in their replicas hold the same share.
    for place in range(ranks.tensor_parallel):
        peers = range(place, ranks.world_size, ranks.tensor_parallel)
        for (name, _), *digests in zip(named, *(table[rank] for rank in peers), strict=True):
            if len(set(digests)) > 1:
                odd = odd_ones(dict(zip(peers, digests, strict=True)))
                raise ReplicasDiffer(
                    f"step {step}: {name} of rank {', '.join(map(str, odd))} differs from the "
                    "other ranks': faulty hardware, or an update that ranks made differently"
                )


def odd_ones(digests: dict[int, int]) -> list[int]:
    """The ranks that are not with the majority; all of them where there is none."""
    (common, count), *others = Counter(digests.values()).most_common()
    if others and others[0][1] == count:
        return list(digests)
    return [rank for rank, value in digests.items() if value != common]


def digest(parameter: Tensor) -> Tensor:
    """A 64-bit number that changes with any bit: the sum of the words, without a copy of them."""
    words = parameter.detach().flatten().view(_WORDS[parameter.element_size()])
    return words.sum(dtype=torch.int64)
