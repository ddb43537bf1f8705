from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data.dataset import Blend, Corpus
from data.loader import Loader

WriteCorpus = Callable[..., Path]


def test_samples_are_packed_and_share_one_token(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11]], 12)
    corpus = Corpus(prefix, 4, 0, vocabulary_size=12, shuffle=False)
    assert corpus.samples_per_epoch == 2  # tokens 9 to 11 are left over
    assert corpus.sample(0).tolist() == [0, 1, 2, 3, 4]
    assert corpus.sample(1).tolist() == [4, 5, 6, 7, 8]
    assert corpus.sample(2).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("tokens", "samples"), [(5, 1), (6, 1), (8, 1), (9, 2), (13, 3)]
)  # sequence length 4
def test_smallest_files(write_corpus: WriteCorpus, tokens: int, samples: int) -> None:
    prefix = write_corpus([list(range(tokens))], 100)
    corpus = Corpus(prefix, 4, 1, vocabulary_size=100)
    assert corpus.samples_per_epoch == samples
    starts = {int(corpus.sample(n)[0]) for n in range(samples)}
    assert starts == {4 * i for i in range(samples)}


def test_too_few_tokens(write_corpus: WriteCorpus) -> None:
    for tokens in (0, 4):
        prefix = write_corpus([list(range(tokens))], 100)
        with pytest.raises(ValueError, match=rf"corpus\.bin: {tokens} tokens .* sample of 5"):
            Corpus(prefix, 4, 0, vocabulary_size=100)


def test_epochs(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([list(range(2 * 23 + 1))], 100)
    corpus = Corpus(prefix, 2, 7, vocabulary_size=100)
    assert corpus.samples_per_epoch == 23
    epochs = [
        corpus.positions(np.arange(23 * epoch, 23 * epoch + 23)).tolist() for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = Corpus(prefix, 2, 7, vocabulary_size=100)
    assert again.positions(np.arange(69)).tolist() == [*epochs[0], *epochs[1], *epochs[2]]


def test_order_and_fingerprint_depend_on_all_of_it(write_corpus: WriteCorpus) -> None:
    tokens = list(range(100))
    one, same = (write_corpus([tokens], 100, name) for name in ("one", "same"))
    other = write_corpus([[*tokens[:-1], 0]], 100, "other")

    def corpus(prefix: Path = one, length: int = 2, seed: int = 0, shuffle: bool = True) -> Corpus:
        return Corpus(prefix, length, seed, vocabulary_size=100, shuffle=shuffle)

    variants = [corpus(), corpus(other), corpus(length=3), corpus(seed=1), corpus(shuffle=False)]
    assert len({variant.fingerprint for variant in variants}) == 5
    orders = [tuple(variant.positions(np.arange(33)).tolist()) for variant in variants]
    assert len(set(orders)) == 5
    assert corpus(same).fingerprint == corpus().fingerprint
    blends = [Blend([corpus(), corpus(other)], w).fingerprint(1) for w in ([1, 1], [1, 2], [2, 2])]
    assert blends[0] == blends[2] != blends[1]
    assert Blend([corpus(seed=1), corpus(other)], [1, 1]).fingerprint(1) != blends[0]


@pytest.mark.parametrize("vocabulary_size", [65_535, 70_000])
def test_ids_beyond_the_models_vocabulary(write_corpus: WriteCorpus, vocabulary_size: int) -> None:
    prefix = write_corpus([[1, 2, 3, 4], [5, 6, 50, 7]], vocabulary_size)
    corpus = Corpus(prefix, 2, 0, vocabulary_size=50, shuffle=False)
    assert corpus.sample(1).tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match=r"corpus\.bin: token 6 is 50, .* vocabulary is 50"):
        corpus.sample(2)


def three(write_corpus: WriteCorpus, samples: tuple[int, ...] = (5, 6, 7)) -> list[Corpus]:
    """Corpora of so many samples; every token tells its corpus and place."""
    corpora = []
    for number, count in enumerate(samples):
        tokens = [1000 * number + place for place in range(2 * count + 1)]
        prefix = write_corpus([tokens], 1 << 19, f"c{number}")
        corpora.append(Corpus(prefix, 2, 0, vocabulary_size=1 << 19))
    return corpora


def test_blend_of_corpora(write_corpus: WriteCorpus) -> None:
    blend = Blend(three(write_corpus), [0.5, 0.3, 0.2])
    located = [blend.locate(n) for n in range(2000)]
    for corpus in range(3):  # each corpus gives its samples in order, none twice and none left out
        numbers = [k for chosen, k in located if chosen == corpus]
        assert numbers == list(range([1000, 600, 400][corpus]))
    for start in range(0, 200, 10):
        window = [chosen for chosen, _ in located[start : start + 10]]
        assert [window.count(corpus) for corpus in range(3)] == [5, 3, 2]
    assert blend.locate(10**12)[1] == [5, 3, 2][blend.locate(0)[0]] * 10**11
    for n in range(40):
        corpus, k = located[n]
        own = blend.corpora[corpus]
        start = 1000 * corpus + 2 * int(own.positions(np.array([k]))[0])
        assert blend.sample(n).tolist() == [start, start + 1, start + 2]
    assert blend.counts(37).tolist() == [sum(c == i for c, _ in located[:37]) for i in range(3)]


def test_shares_are_of_tokens_however_long_the_documents(write_corpus: WriteCorpus) -> None:
    # DP-30: 1,000 documents of 10 tokens and 10 of 1,000, in equal parts.
    short = write_corpus([[1] * 10] * 1000, 100, "short")
    long = write_corpus([[2] * 1000] * 10, 100, "long")
    blend = Blend([Corpus(prefix, 4, 0, vocabulary_size=100) for prefix in (short, long)], [1, 1])
    tokens = np.concatenate([blend.sample(n)[1:] for n in range(1000)])
    assert (tokens == 1).sum() == (tokens == 2).sum() == 2000


def test_three_hundred_corpora(write_corpus: WriteCorpus) -> None:
    # DP-21: more than an 8-bit index holds, a weight of zero, and more epochs than one.
    corpora = three(write_corpus, (2,) * 300)
    blend = Blend(corpora, [0.0, *[1.0] * 299])
    first = [blend.sample(n)[0] // 1000 for n in range(299)]
    assert sorted(first) == list(range(1, 300))
    assert blend.counts(299 * 7).tolist() == [0, *[7] * 299]
    files = len(list(Path("/proc/self/fd").iterdir()))
    assert files < 400, "more than one open file per corpus"


def test_budgets_are_met_to_within_a_sample(write_corpus: WriteCorpus) -> None:
    budgets = [700_001, 41_234, 9, 12_345_678]
    length = 2
    blend = Blend(three(write_corpus, (5, 6, 7, 8)), budgets)
    samples = sum(budgets) // length
    for count, budget in zip(blend.counts(samples).tolist(), budgets, strict=True):
        assert abs(count - budget / length) <= 1


STAGES = [(7, [0.2, 0.8, 0]), (20, [0, 0.5, 0.5]), (64, [1, 1, 1])]


def test_a_schedule_changes_the_mix_and_no_sample_comes_twice(write_corpus: WriteCorpus) -> None:
    blend = Blend(three(write_corpus), [1, 1, 0], STAGES)
    located = [blend.locate(n) for n in range(200)]
    counts = [[c for c, _ in located[a:b]] for a, b in [(0, 7), (7, 20), (20, 64), (64, 200)]]
    shares = [[1 / 2, 1 / 2, 0], [0.2, 0.8, 0], [0, 1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3]]
    for stage, expected in zip(counts, shares, strict=True):
        for corpus in range(3):
            assert abs(stage.count(corpus) - expected[corpus] * len(stage)) < 1
    for corpus in range(3):
        numbers = [k for chosen, k in located if chosen == corpus]
        assert numbers == list(range(len(numbers)))
    for samples in (0, 1, 7, 8, 20, 63, 64, 65, 200):
        seen = [c for c, _ in located[:samples]]
        assert blend.counts(samples).tolist() == [seen.count(corpus) for corpus in range(3)]
    together = blend.locate_all(np.arange(200))
    assert list(zip(*(column.tolist() for column in together), strict=True)) == located
    # Within an epoch of a corpus its samples differ.
    firsts = [int(blend.sample(n)[0]) for n in range(200)]
    for corpus, per_epoch in enumerate((5, 6, 7)):
        own = [first for first in firsts if first // 1000 == corpus]
        for start in range(0, len(own) - per_epoch, per_epoch):
            assert len(set(own[start : start + per_epoch])) == per_epoch


def test_a_fingerprint_is_of_the_samples_so_far(write_corpus: WriteCorpus) -> None:
    # DP-22
    one, two, unread = three(write_corpus)
    blend = Blend([one, two, unread], [1, 1, 0], STAGES)
    same = [
        (Blend([one, two, unread], [1, 1, 0]), 7),  # the stage begins with the next sample
        (Blend([one, two], [1, 1]), 7),
        (Blend([unread, one, two], [0, 2, 2], [(9, [1, 0, 0])]), 7),
        (Blend([one, two, unread], [1, 1, 0], [*STAGES[:2], (70, [1, 0, 0])]), 64),
    ]
    for other, samples in same:
        assert other.fingerprint(samples) == blend.fingerprint(samples)
        assert [other.sample(n).tolist() for n in range(samples)] == [
            blend.sample(n).tolist() for n in range(samples)
        ]
    different = [
        (Blend([one, two, unread], [1, 1, 0]), 8),
        (Blend([one, two, unread], [1, 1, 0], [(6, [0.2, 0.8, 0])]), 7),
        (Blend([one, two, unread], [1, 2, 0]), 1),
        (Blend([one, two, unread], [1, 1, 1]), 1),
        (Blend([two, one, unread], [1, 1, 0]), 1),
        (Blend([one, unread], [1, 1]), 1),
    ]
    for other, samples in different:
        assert other.fingerprint(samples) != blend.fingerprint(samples)


def test_blends_that_do_not_fit(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([list(range(20))], 100)
    two, three = (Corpus(prefix, length, 0, vocabulary_size=100) for length in (2, 3))
    with pytest.raises(ValueError, match=r"sequence lengths \[2, 3\]"):
        Blend([two, three], [1, 1])
    with pytest.raises(ValueError, match="as many weights"):
        Blend([two, two], [1])
    with pytest.raises(ValueError, match="as many weights"):
        Blend([two, two], [1, 1], [(5, [1])])
    with pytest.raises(ValueError, match="0 corpora"):
        Blend([], [])


@pytest.mark.parametrize(
    ("world_size", "micro", "accumulation"), [(1, 12, 1), (3, 2, 2), (4, 1, 3)]
)
def test_a_run_resumed_in_an_epoch_reads_exactly_the_next_samples(
    write_corpus: WriteCorpus, world_size: int, micro: int, accumulation: int
) -> None:
    # CK-11, CK-12: 5 steps of 12 samples on 2 ranks end within the third epoch of the first corpus.
    def steps(
        count: int, world: int, micro: int, accumulation: int, consumed: int
    ) -> list[list[int]]:
        blend = Blend(three(write_corpus, (10, 23, 9)), [0.5, 0.3, 0.2], [(70, [0, 1, 1])])
        loaders = [
            Loader(
                blend, micro_batch=micro, accumulation_steps=accumulation, rank=rank,
                world_size=world, device=torch.device("cpu"), samples_consumed=consumed,
            )
            for rank in range(world)
        ]  # fmt: skip
        seen = []
        for _ in range(count):
            batches = [next(loader) for _ in range(accumulation) for loader in loaders]
            seen.append([int(first) for inputs, _ in batches for first in inputs[:, 0]])
        for loader in loaders:
            loader.close()
        return seen

    whole = steps(12, 1, 12, 1, 0)
    first = steps(5, 2, 2, 3, 0)
    assert first == whole[:5]
    assert steps(7, world_size, micro, accumulation, 60) == whole[5:]


def test_each_sample_of_an_epoch_comes_once(write_corpus: WriteCorpus) -> None:
    # DP-20, and CK-11 for the epochs' orders.
    (corpus,) = three(write_corpus, (50,))
    with Loader(
        corpus,
        micro_batch=5,
        accumulation_steps=1,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
    ) as batches:
        epochs = [[int(n) for _ in range(10) for n in next(batches)[0][:, 0]] for _ in range(3)]
    assert all(sorted(epoch) == list(range(0, 100, 2)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
