"""How long the documents of a token file are, exactly, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Lengths below it are counted each; above it there are few documents: one for a million tokens.
_COUNTED = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """Tokens of documents. Quantiles are lengths that occur: the smallest that is not exceeded by
    at least that share of the documents."""

    documents: int
    tokens: int
    minimum: int
    median: int
    p99: int
    maximum: int
    buckets: list[tuple[int, int, int, int]]
    """(from, to, documents, tokens) of lengths that begin at powers of two, both ends inclusive."""

    @property
    def mean(self) -> float:
        return self.tokens / self.documents


def measure(blocks: Iterable[npt.NDArray[np.int64]]) -> Lengths | None:
    """None if there is no document. `blocks`: lengths, any number at a time."""
    counts = np.zeros(_COUNTED, np.int64)
    longer: list[npt.NDArray[np.int64]] = []
    for block in blocks:
        counts += np.bincount(block[block < _COUNTED], minlength=_COUNTED)
        longer.append(block[block >= _COUNTED])
    few, few_counts = np.unique(
        np.concatenate([*longer, np.empty(0, np.int64)]), return_counts=True
    )
    lengths = np.concatenate((np.flatnonzero(counts), few))
    occurring = np.concatenate((counts[counts > 0], few_counts))
    if len(lengths) == 0:
        return None
    passed = np.cumsum(occurring)
    documents = int(passed[-1])

    def quantile(percent: int) -> int:
        rank = -(-documents * percent // 100)  # rounded up: documents are counted from 1
        return int(lengths[np.searchsorted(passed, rank)])

    return Lengths(
        documents=documents,
        tokens=int(lengths @ occurring),
        minimum=int(lengths[0]),
        median=quantile(50),
        p99=quantile(99),
        maximum=int(lengths[-1]),
        buckets=_buckets(lengths, occurring),
    )


def _buckets(
    lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> list[tuple[int, int, int, int]]:
    starts = [0, *(1 << bit for bit in range(int(lengths[-1]).bit_length()))]
    starts = [start for start in starts if 2 * start > lengths[0] or start == lengths[0] == 0]
    buckets = []
    for start in starts:
        end = max(0, 2 * start - 1)
        inside = (lengths >= start) & (lengths <= end)
        tokens = int(lengths[inside] @ counts[inside])
        buckets.append((start, end, int(counts[inside].sum()), tokens))
    return buckets
