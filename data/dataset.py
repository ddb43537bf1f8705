"""From a sample's number to its tokens, as pure functions: nothing is built, stored or advanced.

A sample is sequence_length + 1 tokens cut from the concatenated documents, so that neighbouring
samples share one token and every token but the first is predicted once. An epoch is the
(tokens - 1) // sequence_length whole samples of a corpus; what is left at its end is not used.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.token_file import TokenArray, TokenFile

_FEISTEL_ROUNDS = 8
_MASK = (1 << 64) - 1

# A blend's order is stored for one period; shares are rounded to this denominator if need be.
MAX_BLEND_PERIOD = 1 << 16


class VocabularyError(ValueError):
    """A token id that the model has no embedding for, found while reading a sample."""


class Corpus:
    """The samples of one token file, shuffled anew in every epoch.

    Args:
        prefix: path of the token file without .bin or .idx.
        sequence_length: tokens of an input; samples are one longer.
        seed: of the order.
        vocabulary_size: ids must be below it.
        shuffle: False keeps the order of the file, as validation wants.

    Raises:
        OSError, ValueError: see TokenFile.
        ValueError: the file is shorter than one sample, or made for a larger vocabulary.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        seed: int,
        *,
        vocabulary_size: int,
        shuffle: bool = True,
    ) -> None:
        self.file = TokenFile(prefix)
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        self.samples_per_epoch = (self.file.token_count - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise ValueError(
                f"{self.file.bin_path}: {self.file.token_count:,} tokens are too few for one "
                f"sample of {sequence_length + 1:,} (sequence length {sequence_length:,} plus one)"
            )
        manifest = self.file.manifest
        if manifest is not None and manifest.vocabulary_size > vocabulary_size:
            raise ValueError(
                f"{prefix}: its tokenizer has {manifest.vocabulary_size:,} ids, but the model's "
                f"vocabulary is {vocabulary_size:,}: make the model's at least as large"
            )
        self._shuffle = shuffle
        self.fingerprint = _digest(self.file.fingerprint, sequence_length, seed, shuffle)

    def sample(self, n: int) -> TokenArray:
        """[sequence_length + 1] tokens of sample n = 0, 1, ...: a view, in the file's dtype.

        Raises VocabularyError naming file and position if an id is not in the vocabulary.
        """
        start = self.position(n) * self.sequence_length
        tokens = self.file.tokens(start, self.sequence_length + 1)
        if int(tokens.max()) >= self.vocabulary_size or int(tokens.min()) < 0:
            self._refuse(tokens, start)
        return tokens

    def position(self, n: int) -> int:
        """Where in the file, counted in samples, the n-th sample lies."""
        epoch, k = divmod(n, self.samples_per_epoch)
        return (
            permute(k, self.samples_per_epoch, f"{self.fingerprint} {epoch}")
            if self._shuffle
            else k
        )

    def _refuse(self, tokens: TokenArray, start: int) -> None:
        first = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocabulary_size))[0])
        raise VocabularyError(
            f"{self.file.bin_path}: token {start + first:,} is {int(tokens[first])}, but the "
            f"model's vocabulary is {self.vocabulary_size:,}: made for another tokenizer?"
        )


def require_one_tokenizer(corpora: Sequence[Corpus]) -> None:
    """Raises ValueError if corpora with manifests were made with different tokenizers."""
    made_with = {
        str(corpus.file.bin_path): corpus.file.manifest.inputs.tokenizer.sha256
        for corpus in corpora
        if corpus.file.manifest is not None
    }
    if len(set(made_with.values())) > 1:
        listed = ", ".join(f"{path} ({sha256[:12]})" for path, sha256 in made_with.items())
        raise ValueError(f"the corpora were made with different tokenizers: {listed}")


class Blend:
    """Samples of several corpora, mixed so that every period gives each exactly its share, and
    every prefix of the run misses no share by a whole sample.

    Args:
        corpora: of one sequence length.
        weights: of the corpora, in any unit; only their ratios count.

    Raises:
        ValueError: weights are not positive and finite, or do not match the corpora.
    """

    def __init__(self, corpora: Sequence[Corpus], weights: Sequence[float]) -> None:
        if not corpora or len(corpora) != len(weights):
            raise ValueError(
                f"a blend of {len(corpora)} corpora needs as many weights, got {list(weights)}"
            )
        lengths = {corpus.sequence_length for corpus in corpora}
        if len(lengths) > 1:
            raise ValueError(f"the corpora of a blend have the sequence lengths {sorted(lengths)}")
        self.corpora = list(corpora)
        self.sequence_length = corpora[0].sequence_length
        self.shares = blend_shares(weights)
        """Samples of each corpus in one period."""
        self.period = sum(self.shares)
        self._order = fair_order(self.shares)
        # How often the corpus of each place came before it within the period.
        self._rank = np.empty(self.period, np.int64)
        for corpus, share in enumerate(self.shares):
            self._rank[self._order == corpus] = np.arange(share)
        self.fingerprint = _digest(*(corpus.fingerprint for corpus in corpora), *self.shares)

    def locate(self, n: int) -> tuple[int, int]:
        """(number of the corpus, number of its sample) of the blend's n-th sample."""
        period, place = divmod(n, self.period)
        corpus = int(self._order[place])
        return corpus, period * self.shares[corpus] + int(self._rank[place])

    def sample(self, n: int) -> TokenArray:
        """As Corpus.sample."""
        corpus, k = self.locate(n)
        return self.corpora[corpus].sample(k)


def permute(k: int, size: int, key: str) -> int:
    """The image of k under a bijection of range(size) chosen by the key.

    A Feistel network on pairs (left, right) of range(a) x range(b), a * b >= size, that walks on
    until it is back in range: https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf (method 2).
    With a and b near the square root of `size`, it hardly ever has to walk.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    keys = _round_keys(key)
    while True:
        left, right = divmod(k, b)
        for i in range(0, _FEISTEL_ROUNDS, 2):
            left = (left + _mix(right ^ keys[i])) % a
            right = (right + _mix(left ^ keys[i + 1])) % b
        k = left * b + right
        if k < size:
            return k


@functools.lru_cache(maxsize=256)
def _round_keys(key: str) -> tuple[int, ...]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
    return tuple(np.frombuffer(digest, "<u8").tolist())


def _mix(x: int) -> int:
    """A 64-bit hash: the finaliser of SplitMix64 (https://doi.org/10.1145/2714064.2660195)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def blend_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the ratio of the weights: exactly where their sum can be MAX_BLEND_PERIOD or
    less, else rounded to that sum by largest remainder.

    Raises ValueError for a weight that is not positive and finite, or too small to get a share.
    """
    if bad := [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]:
        raise ValueError(f"blend weights must be positive and finite, got {bad}")
    # Through str, 0.1 means one tenth and not the binary fraction next to it.
    exact = [Fraction(str(weight)) for weight in weights]
    exact = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(weight.denominator for weight in exact))
    if period <= MAX_BLEND_PERIOD:
        return [int(weight * period) for weight in exact]
    quotas = [weight * MAX_BLEND_PERIOD for weight in exact]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: shares[i] - quotas[i])
    for i in by_remainder[: MAX_BLEND_PERIOD - sum(shares)]:
        shares[i] += 1
    if 0 in shares:
        raise ValueError(
            f"blend weight {weights[shares.index(0)]} is below 1/{MAX_BLEND_PERIOD} of the total"
        )
    return shares


def fair_order(shares: Sequence[int]) -> npt.NDArray[np.int64]:
    """[sum of shares] numbers of corpora, such that after every t places each has had its share
    times t / sum, less than one place more or less.

    Tijdeman's solution of the chairman assignment problem
    (https://doi.org/10.1016/0012-365X(80)90269-1), multiplied out to whole numbers.
    """
    share = np.array(shares, np.int64)
    period, n = int(share.sum()), len(share)
    order = np.zeros(period, np.int64)
    if n == 1:
        return order
    slack = 2 * n - 2
    owed = np.zeros(n, np.int64)  # share * places so far - period * places got
    for place in range(period):
        owed += share
        # Of those owed enough to be served, the one that would first be owed a whole place.
        patience = ((slack - 1) * period - slack * owed) / share
        chosen = np.where(slack * owed >= period, patience, np.inf).argmin()
        owed[chosen] -= period
        order[place] = chosen
    return order


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
