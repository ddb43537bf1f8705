from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data.dataset import Corpus
from data.loader import Loader, evaluation_batches, read_batches
from data.order import Numbers as Numbers_

CPU = torch.device("cpu")


class Numbers:
    """Sample n is n, n + 1000, n + 2000."""

    sequence_length = 2

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.read_so_far = 0

    def places(self, numbers: Numbers_) -> Numbers_:
        return numbers[:, None]

    def read(self, places: Numbers_, out: Numbers_) -> None:
        self.read_so_far = max(self.read_so_far, int(places.max()) + 1)
        if self.fail_at in places:
            raise ValueError(f"sample {self.fail_at} is damaged")
        out[...] = places + np.array([0, 1000, 2000])


def loader(dataset: object = None, **changes: int) -> Loader:
    options = {"micro_batch": 2, "accumulation_steps": 1, "rank": 0, "world_size": 1, **changes}
    return Loader(dataset or Numbers(), device=CPU, **options)  # type: ignore[arg-type]


def steps(
    count: int, world_size: int, micro: int, accumulation: int, consumed: int
) -> Iterator[list[int]]:
    """The samples of each optimizer step, from all ranks."""
    ranks = [
        loader(
            micro_batch=micro, accumulation_steps=accumulation, rank=rank, world_size=world_size,
            samples_consumed=consumed,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    for _ in range(count):
        batches = [next(rank) for _ in range(accumulation) for rank in ranks]
        yield [int(n) for inputs, _ in batches for n in inputs[:, 0]]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(
    ("world_size", "micro", "accumulation"),
    [
        (1, 8, 1),
        (1, 1, 8),
        (1, 2, 4),
        (2, 4, 1),
        (2, 1, 4),
        (2, 2, 2),
        (4, 2, 1),
        (4, 1, 2),
        (8, 1, 1),
    ],
)
def test_steps_do_not_depend_on_the_split(world_size: int, micro: int, accumulation: int) -> None:
    # DP-18: 8 distinct samples a step, the same for every split; in order of micro step and rank.
    expected = [list(range(40 + 8 * step, 48 + 8 * step)) for step in range(5)]
    assert list(steps(5, world_size, micro, accumulation, consumed=40)) == expected


def test_inputs_and_targets_are_shifted_by_one() -> None:
    with loader() as batches:
        inputs, targets = next(batches)
    assert inputs.tolist() == [[0, 1000], [1, 1001]]
    assert targets.tolist() == [[1000, 2000], [1001, 2001]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_consumed_counts_whole_steps_handed_out() -> None:
    with loader(micro_batch=2, accumulation_steps=3, world_size=2, samples_consumed=100) as batches:
        seen = []
        for _ in range(7):
            next(batches)
            seen.append(batches.samples_consumed)
        assert seen == [100, 100, 112, 112, 112, 124, 124]
        assert batches.wait_seconds > 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resume_continues_exactly(world_size: int) -> None:
    whole = list(itertools.chain(*steps(12, 1, 6, 1, consumed=0)))
    first = list(itertools.chain(*steps(5, 2, 3, 1, consumed=0)))
    rest = list(itertools.chain(*steps(7, world_size, 6 // world_size, 1, consumed=len(first))))
    assert first + rest == whole == list(range(72))


def test_prefetch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.loader.TOKENS_READ_TOGETHER", 12)  # two micro-batches of 2 x 3
    dataset = Numbers()
    with loader(dataset, prefetch=3) as batches:
        next(batches)
        batches._futures[-1].result()
        assert dataset.read_so_far == 2 * 4


def test_errors_of_the_thread_surface_with_their_batch() -> None:
    # Read together with it, the batches before a bad sample are good.
    with loader(Numbers(fail_at=5)) as batches:
        assert next(batches)[0][0, 0] == 0
        assert next(batches)[0][0, 0] == 2
        with pytest.raises(ValueError, match="sample 5 is damaged"):
            next(batches)


@pytest.mark.parametrize(("planned", "together"), [(1, 1), (7, 12), (64, 100), (4096, 1 << 17)])
def test_reading_ahead_does_not_change_what_is_read(
    monkeypatch: pytest.MonkeyPatch, planned: int, together: int
) -> None:
    monkeypatch.setattr("data.loader.PLANNED_SAMPLES", planned)
    monkeypatch.setattr("data.loader.TOKENS_READ_TOGETHER", together)
    expected = [list(range(40 + 6 * step, 46 + 6 * step)) for step in range(30)]
    assert list(steps(30, 2, 3, 1, consumed=40)) == expected
    batches = read_batches(Numbers(), 40, 3, 6, CPU)
    assert [next(batches)[:, 0].tolist() for _ in range(5)] == [row[:3] for row in expected[:5]]


def test_close_ends_thread_and_iteration() -> None:
    before = threading.active_count()
    with loader() as batches:
        next(batches)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert list(batches) == []


def test_forgotten_loader_does_not_hang_the_interpreter() -> None:
    script = (
        "import torch\nfrom test_loader import Numbers, loader\n"
        "batches = loader()\nnext(batches)\nprint('end')"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {paths}\n{script}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


@pytest.mark.parametrize("samples", [1, 5, 8, 9])
@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (1, 4), (2, 3), (4, 2)])
def test_evaluation_counts_each_sample_once(samples: int, world_size: int, micro: int) -> None:
    ranks = [
        list(
            evaluation_batches(
                Numbers(), samples, micro_batch=micro, rank=rank, world_size=world_size, device=CPU
            )
        )
        for rank in range(world_size)
    ]
    counted = [int(n) for rank in ranks for inputs, _, count in rank for n in inputs[:count, 0]]
    assert sorted(counted) == list(range(samples))
    # Collectives: equally many batches on each rank, none of them empty.
    assert len({len(rank) for rank in ranks}) == 1
    for rank in ranks:
        for inputs, targets, count in rank:
            assert len(inputs) == len(targets) == max(1, count)


def test_every_label_is_kept(write_corpus: Callable[..., Path]) -> None:
    # DP-27, DP-29: every token but the first is a label once per epoch, ends of documents too.
    documents = [[10, 11, 2], [12, 2], [13, 14, 15, 16, 2], [17, 18, 2]]
    tokens = list(itertools.chain(*documents))
    assert len(tokens) == 13
    corpus = Corpus(write_corpus(documents, 100), 3, 5, vocabulary_size=100)
    with Loader(
        corpus, micro_batch=1, accumulation_steps=1, rank=0, world_size=1, device=CPU
    ) as batches:
        epoch = [next(batches) for _ in range(4)]
    pairs = [(a, b) for x, y in epoch for a, b in zip(x[0].tolist(), y[0].tolist(), strict=True)]
    assert sorted(pairs) == sorted(itertools.pairwise(tokens))
    assert sum(label == 2 for _, label in pairs) == len(documents)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_gpu() -> None:
    options = {"micro_batch": 2, "accumulation_steps": 1, "rank": 0, "world_size": 1}
    with Loader(Numbers(), device=torch.device("cuda"), **options) as batches:  # type: ignore[arg-type]
        for step in range(20):
            inputs, targets = next(batches)
            assert inputs.device.type == "cuda"
            assert inputs.tolist() == [[2 * step, 2 * step + 1000], [2 * step + 1, 2 * step + 1001]]
            assert torch.equal(targets, inputs + 1000)
