"""Which sample comes when, as pure functions of its number: a permutation and a mix of corpora.

Both take arrays of numbers, as a loader asks for those of many batches at once.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_FEISTEL_ROUNDS = 8

# The order of a mix is stored for one period of at most so many places.
MAX_BLEND_PERIOD = 1 << 16


def permute(numbers: Numbers, size: int, key: str) -> Numbers:
    """The images of numbers under a bijection of range(size), size <= 2**62, chosen by the key.

    A Feistel network on pairs (left, right) of range(a) x range(b), a * b >= size, that walks on
    until it is back in range: https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf (method 2).
    With a and b near the square root of `size`, it hardly ever has to walk.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    keys = _round_keys(key)
    images = _feistel(numbers.astype(np.uint64), np.uint64(a), np.uint64(b), keys)
    while (out := np.flatnonzero(images >= size)).size:
        images[out] = _feistel(images[out], np.uint64(a), np.uint64(b), keys)
    return images.astype(np.int64)


def _feistel(
    numbers: npt.NDArray[np.uint64], a: np.uint64, b: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    left = numbers // b
    right = numbers - left * b
    for i in range(0, _FEISTEL_ROUNDS, 2):
        # Reduced before the sum, which would else overflow.
        left = _modulo(left + _modulo(_mix(right ^ keys[i]), a), a)
        right = _modulo(right + _modulo(_mix(left ^ keys[i + 1]), b), b)
    return left * b + right


def _modulo(x: npt.NDArray[np.uint64], divisor: np.uint64) -> npt.NDArray[np.uint64]:
    """numpy divides by one number with vector instructions, but has none for the remainder."""
    return x - x // divisor * divisor


@functools.lru_cache(maxsize=256)
def _round_keys(key: str) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A 64-bit hash: the finaliser of SplitMix64 (https://doi.org/10.1145/2714064.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def exact_weights(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """The weights' shares of one, exactly.

    Raises ValueError for a weight that is negative or not finite, or where all are zero.
    """
    if bad := [weight for weight in weights if not (math.isfinite(weight) and weight >= 0)]:
        raise ValueError(f"blend weights must be finite and not negative, got {bad}")
    # Through str, 0.1 means one tenth and not the binary fraction next to it.
    exact = [Fraction(str(weight)) for weight in weights]
    if not sum(exact):
        raise ValueError("blend weights are all zero: nothing to read")
    return tuple(weight / sum(exact) for weight in exact)


class Mix:
    """An endless order of corpora, in which each has its share.

    Where the shares have a common denominator of MAX_BLEND_PERIOD or less, every period of so many
    places holds each share exactly, and every prefix misses none by a whole place; hence a window
    that begins anywhere misses none by two. Otherwise the period is MAX_BLEND_PERIOD, its shares
    are rounded down, and the places left over follow a mix of the remainders: every prefix then
    misses no share by three places, up to 2**32 places and more.

    Args:
        shares: of each corpus, adding up to one; zero for one that does not appear.
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        denominator = math.lcm(*(share.denominator for share in shares))
        exact = denominator <= MAX_BLEND_PERIOD
        self.period = denominator if exact else MAX_BLEND_PERIOD
        quotas = [share * self.period for share in shares]
        whole = [math.floor(quota) for quota in quotas]
        self._rest: Mix | None = None
        if not exact:
            self._rest = Mix(_rounded([q - w for q, w in zip(quotas, whole, strict=True)]))
            whole.append(self.period - sum(whole))
        self._whole = np.array(whole, np.int64)
        self._order = fair_order(whole)
        # The places of each corpus, corpus by corpus, ascending: counting is a search in them.
        by_corpus = np.argsort(self._order, kind="stable")
        self._keys = self._order[by_corpus] * self.period + by_corpus
        self._begin = np.cumsum(self._whole) - self._whole
        self._rank = np.empty(self.period, np.int64)  # of a place among its corpus' own
        self._rank[by_corpus] = np.arange(self.period) - np.repeat(self._begin, self._whole)

    def locate(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """The corpus at each place, and how often it came before."""
        periods = places // self.period
        place = places - periods * self.period
        chosen = self._order[place]
        before = periods * self._whole[chosen] + self._rank[place]
        if self._rest is None:
            return chosen, before
        over = len(self._whole) - 1
        left_over = np.flatnonzero(chosen == over)
        chosen[left_over], _ = self._rest.locate(before[left_over])
        before[left_over] = self._count(chosen[left_over], places[left_over])
        before += self._rest.count(chosen, self._count(np.full_like(places, over), places))
        return chosen, before

    def count(self, corpora: Numbers, places: Numbers) -> Numbers:
        """How often each corpus comes before the place that stands beside it."""
        counted = self._count(corpora, places)
        if self._rest is not None:
            over = np.full_like(places, len(self._whole) - 1)
            counted += self._rest.count(corpora, self._count(over, places))
        return counted

    def _count(self, corpora: Numbers, places: Numbers) -> Numbers:
        periods, place = np.divmod(places, self.period)
        within = np.searchsorted(self._keys, corpora * self.period + place)
        counted: Numbers = periods * self._whole[corpora] + within - self._begin[corpora]
        return counted


def _rounded(weights: Sequence[Fraction]) -> list[Fraction]:
    """The weights' shares as parts of MAX_BLEND_PERIOD, by largest remainder."""
    total = sum(weights)
    quotas = [weight / total * MAX_BLEND_PERIOD for weight in weights]
    parts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: parts[i] - quotas[i])
    for i in by_remainder[: MAX_BLEND_PERIOD - sum(parts)]:
        parts[i] += 1
    return [Fraction(part, MAX_BLEND_PERIOD) for part in parts]


def fair_order(shares: Sequence[int]) -> Numbers:
    """[sum of shares] numbers of corpora, such that after every t places each has had its share
    times t / sum, less than one place more or less.

    Tijdeman's solution of the chairman assignment problem
    (https://doi.org/10.1016/0012-365X(80)90269-1): of the corpora that are owed enough, the one
    that would first be owed a whole place is next.
    """
    corpora = [corpus for corpus, share in enumerate(shares) if share]
    period = sum(shares)
    if len(corpora) == 1:
        return np.full(period, corpora[0], np.int64)
    slack = 2 * len(corpora) - 2
    order = []
    had = [0] * len(shares)
    ripe: list[tuple[float, int]] = []  # (when it will be owed a whole place, corpus)
    ripening: list[list[int]] = [[] for _ in range(period + 1)]  # by the place they are ripe at

    def wait(corpus: int, place: int) -> None:
        owed_enough = -(-period * (1 + slack * had[corpus]) // (slack * shares[corpus]))
        ripening[min(max(owed_enough, place), period)].append(corpus)

    for corpus in corpora:
        wait(corpus, 1)
    for place in range(1, period + 1):
        for corpus in ripening[place]:
            heapq.heappush(ripe, ((slack - 1 + slack * had[corpus]) / shares[corpus], corpus))
        _, chosen = heapq.heappop(ripe)
        order.append(chosen)
        had[chosen] += 1
        if place < period:
            wait(chosen, place + 1)
    return np.array(order, np.int64)
