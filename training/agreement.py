"""Before the first step: do the ranks read what they should, and no two the same?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from training.engine import Ranks


class RanksDisagree(RuntimeError):
    """Ranks would train on each other's samples, or on different data."""


def require_distinct_batches(ranks: Ranks, first_samples: range, fingerprint: str) -> None:
    """A collective call, once a run.

    Args:
        first_samples: numbers of the samples in this rank's first micro-batch. Numbers and not
            tokens: in a small or repetitive corpus two samples may well be equal.
        fingerprint: of the data behind the numbers, in hexadecimal.

    Raises:
        RanksDisagree: on all ranks.
    """
    row = [ranks.data_rank, first_samples.start, first_samples.stop, int(fingerprint[:15], 16)]
    own = torch.tensor(row, device=ranks.device)
    rows = [torch.empty_like(own) for _ in range(ranks.world_size)]
    torch.distributed.all_gather(rows, own)
    if problem := disagreement([row.tolist() for row in rows]):
        raise RanksDisagree(problem)


def disagreement(rows: Sequence[Sequence[int]]) -> str | None:
    """What is wrong with the ranks' (data rank, first sample, end, data), or None.

    Ranks of one data rank, the parts of a tensor-parallel model, have to read the same.
    """
    readers: dict[int, tuple[int, Sequence[int]]] = {}  # sample -> who reads it first
    for rank, (data_rank, start, stop, data) in enumerate(rows):
        if data != rows[0][3]:
            return (
                f"rank {rank} does not read the data that rank 0 reads: the files of data.train "
                "differ between hosts"
            )
        for sample in range(start, stop):
            other, row = readers.setdefault(sample, (rank, rows[rank]))
            if row[0] != data_rank:
                return (
                    f"ranks {other} and {rank} both read sample {sample:,} in their first batch: "
                    "each step would train on fewer samples than it counts"
                )
        same = next((other for other in range(rank) if rows[other][0] == data_rank), rank)
        if list(rows[same]) != list(rows[rank]):
            return (
                f"ranks {same} and {rank} are parts of one replica, but read samples from "
                f"{rows[same][1]:,} and from {start:,}"
            )
    return None
