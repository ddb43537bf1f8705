"""From a sample's number to its tokens, as pure functions: nothing is built, stored or advanced.

A sample is sequence_length + 1 tokens cut from the concatenated documents, so that neighbouring
samples share one token and every token but the first is predicted once. An epoch is the
(tokens - 1) // sequence_length whole samples of a corpus; what is left at its end is not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from data.manifest import TokenizerRecord
from data.order import Mix, Numbers, exact_weights, permute
from data.token_file import TokenArray, TokenFile


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
        tokenizer: that made a file without a manifest; see data/foreign.py.

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
        tokenizer: TokenizerRecord | None = None,
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
        self.tokenizer = manifest.inputs.tokenizer if manifest else tokenizer
        """What the ids mean; None where neither the manifest nor the caller says."""
        if self.tokenizer is not None and self.tokenizer.vocabulary_size > vocabulary_size:
            raise ValueError(
                f"{prefix}: its tokenizer has {self.tokenizer.vocabulary_size:,} ids, but the "
                f"model's vocabulary is {vocabulary_size:,}: make the model's at least as large"
            )
        limits = np.iinfo(self.file.dtype)
        self._ids_can_be_wrong = limits.min < 0 or limits.max >= vocabulary_size
        self._shuffle = shuffle
        self.fingerprint = _digest(self.file.fingerprint, sequence_length, seed, shuffle)

    def sample(self, n: int) -> Numbers:
        """[sequence_length + 1] tokens of sample n = 0, 1, ...

        Raises VocabularyError naming file and position if an id is not in the vocabulary.
        """
        return sample(self, n)

    def positions(self, numbers: Numbers) -> Numbers:
        """Where in the file, counted in samples, the samples of these numbers lie."""
        epochs, within = np.divmod(numbers, self.samples_per_epoch)
        if not self._shuffle:
            return within
        for epoch in np.unique(epochs):
            own = epochs == epoch
            within[own] = permute(within[own], self.samples_per_epoch, self._epoch_key(epoch))
        return within

    def _epoch_key(self, epoch: int) -> str:
        return f"{self.fingerprint} {epoch}"

    def places(self, numbers: Numbers) -> Numbers:
        """[numbers, 2]: 0, for the only corpus, and the sample's first token in the file."""
        starts = self.positions(numbers) * self.sequence_length
        return np.stack([np.zeros_like(starts), starts], axis=1)

    def read(self, places: Numbers, out: Numbers) -> None:
        """Copy the samples at `places` to out, [places, sequence_length + 1].

        Raises VocabularyError as `sample`.
        """
        out[...] = self.samples_at(places[:, 1])

    def samples_at(self, starts: Numbers) -> TokenArray:
        """[starts, sequence_length + 1] tokens from each start on, in the file's dtype."""
        tokens = self.file.rows(starts, self.sequence_length + 1)
        if self._ids_can_be_wrong and not self._ids_fit(tokens):
            self._refuse(tokens, starts)
        return tokens

    def _ids_fit(self, tokens: TokenArray) -> bool:
        unsigned = tokens.dtype.kind == "u"
        return bool(tokens.max() < self.vocabulary_size and (unsigned or tokens.min() >= 0))

    def _refuse(self, tokens: TokenArray, starts: Numbers) -> None:
        row, column = np.argwhere((tokens < 0) | (tokens >= self.vocabulary_size))[0]
        raise VocabularyError(
            f"{self.file.bin_path}: token {starts[row] + column:,} is {int(tokens[row, column])}, "
            f"but the model's vocabulary is {self.vocabulary_size:,}: made for another tokenizer?"
        )


@dataclass(frozen=True)
class Stage:
    """A part of a run with one mix of the corpora."""

    first: int
    """The run's number of its first sample."""
    shares: tuple[Fraction, ...]
    """Of the samples, by corpus."""
    mix: Mix
    used: Numbers
    """Samples of each corpus before this stage."""


class Blend:
    """Samples of several corpora, each with its share; see Mix for how exact the shares are.

    Later stages of a run may mix in other shares. Every corpus goes on from its own count there, so
    that no sample comes twice within an epoch of its corpus.

    Args:
        corpora: of one sequence length.
        weights: of the corpora, in any unit; only their ratios count. 0 reads nothing of one.
        schedule: (number of its first sample, weights) of each later stage, in ascending order.

    Raises:
        ValueError: weights are negative, not finite, all zero, or do not match the corpora.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        weights: Sequence[float],
        schedule: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        for given in (weights, *(later for _, later in schedule)):
            if not corpora or len(corpora) != len(given):
                raise ValueError(
                    f"a blend of {len(corpora)} corpora needs as many weights, got {list(given)}"
                )
        lengths = {corpus.sequence_length for corpus in corpora}
        if len(lengths) > 1:
            raise ValueError(f"the corpora of a blend have the sequence lengths {sorted(lengths)}")
        self.corpora = list(corpora)
        self.sequence_length = corpora[0].sequence_length
        self.stages: list[Stage] = []
        for first, given in [(0, weights), *schedule]:
            used = self.counts(first) if self.stages else np.zeros(len(corpora), np.int64)
            shares = exact_weights(given)
            self.stages.append(Stage(first, shares, Mix(shares), used))
        self._firsts = np.array([stage.first for stage in self.stages])
        assert (np.diff(self._firsts) > 0).all(), "stages out of order"

    def counts(self, samples: int) -> Numbers:
        """How many of the run's first `samples` samples are of each corpus."""
        stage = [stage for stage in self.stages if stage.first < samples or stage.first == 0][-1]
        corpora = np.arange(len(self.corpora))
        return stage.used + stage.mix.count(corpora, np.full_like(corpora, samples - stage.first))

    def locate(self, n: int) -> tuple[int, int]:
        """(number of the corpus, number of its sample) of the blend's n-th sample."""
        (corpus,), (number,) = self.locate_all(np.array([n]))
        return int(corpus), int(number)

    def locate_all(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """As locate, of each number."""
        corpora, within = np.empty_like(numbers), np.empty_like(numbers)
        stages = np.searchsorted(self._firsts, numbers, "right") - 1
        for number in np.unique(stages):
            stage, own = self.stages[number], stages == number
            corpora[own], before = stage.mix.locate(numbers[own] - stage.first)
            within[own] = stage.used[corpora[own]] + before
        return corpora, within

    def places(self, numbers: Numbers) -> Numbers:
        """[numbers, 2]: the corpus of each sample, and its first token in that corpus' file."""
        corpora, within = self.locate_all(numbers)
        for corpus in np.unique(corpora):
            own = corpora == corpus
            within[own] = self.corpora[corpus].positions(within[own]) * self.sequence_length
        return np.stack([corpora, within], axis=1)

    def read(self, places: Numbers, out: Numbers) -> None:
        """As Corpus.read."""
        for corpus in np.unique(places[:, 0]):
            own = np.flatnonzero(places[:, 0] == corpus)
            tokens = self.corpora[corpus].samples_at(places[own, 1])
            if len(own) == len(out):
                out[...] = tokens
            else:
                out[own] = tokens

    def sample(self, n: int) -> Numbers:
        """As Corpus.sample."""
        return sample(self, n)

    def fingerprint(self, samples: int) -> str:
        """Equal for blends that hand out the same first `samples` samples, whatever follows: of
        the stages that begin before, their corpora with a share."""
        return _digest(
            *(
                (
                    stage.first,
                    *(
                        (corpus.fingerprint, str(share))
                        for corpus, share in zip(self.corpora, stage.shares, strict=True)
                        if share
                    ),
                )
                for stage in self.stages
                if stage.first < samples
            )
        )


def sample(dataset: Corpus | Blend, n: int) -> Numbers:
    tokens = np.empty((1, dataset.sequence_length + 1), np.int64)
    dataset.read(dataset.places(np.array([n])), tokens)
    return tokens[0]


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
