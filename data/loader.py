"""Batches for one rank of a data-parallel run. The whole state is one number: samples consumed."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from data.order import Numbers

# Samples whose places are worked out together: array arithmetic on a few takes as long as on many.
PLANNED_SAMPLES = 2048

# Small micro-batches are read several at a time, into one buffer of 1 MiB, for the same reason.
TOKENS_READ_TOGETHER = 1 << 17


class Dataset(Protocol):
    """What Corpus and Blend have in common."""

    sequence_length: int

    def places(self, numbers: Numbers) -> Numbers: ...

    def read(self, places: Numbers, out: Numbers) -> None: ...


class Loader:
    """Endless iterator over the micro-batches of one rank.

    An optimizer step consumes the next micro_batch * accumulation_steps * world_size samples,
    whatever the three factors are. Yields (inputs, targets) on `device`, both int64 [micro_batch,
    sequence_length]; targets[i, t] is the token after inputs[i, t]: nothing else may shift them.

    Batches are read ahead by one background thread, whose errors are raised here. Use as a context
    manager, or call close().

    Args:
        micro_batch: samples per rank and forward pass.
        accumulation_steps: micro-batches per optimizer step.
        samples_consumed: by all ranks before this loader.
        prefetch: micro-batches read ahead.

    Attributes:
        samples_consumed: by all ranks, up to the last optimizer step whose micro-batches were all
            handed out; resume with it, at any world size.
        first_samples: numbers of this rank's first micro-batch.
        wait_seconds: how long next() has waited for data, in total.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch: int,
        accumulation_steps: int,
        rank: int,
        world_size: int,
        device: torch.device,
        samples_consumed: int = 0,
        prefetch: int = 4,
    ) -> None:
        self._device = device
        self._samples_per_micro_step = micro_batch * world_size
        self._samples_per_step = micro_batch * world_size * accumulation_steps
        self._handed_out = 0  # samples by all ranks in the current optimizer step
        first = samples_consumed + rank * micro_batch
        self.first_samples = range(first, first + micro_batch)
        self._source = read_batches(
            dataset, first, micro_batch, self._samples_per_micro_step, device
        )
        self.samples_consumed = samples_consumed
        self.wait_seconds = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data-loader")
        self._futures: deque[Future[Tensor]] = deque()
        for _ in range(prefetch):
            self._read_ahead()

    def _read_ahead(self) -> None:
        self._futures.append(self._thread.submit(next, self._source))

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not self._futures:
            raise StopIteration
        started = time.perf_counter()
        batch = self._futures.popleft().result()
        self.wait_seconds += time.perf_counter() - started
        self._read_ahead()
        self._handed_out += self._samples_per_micro_step
        if self._handed_out == self._samples_per_step:
            self.samples_consumed += self._samples_per_step
            self._handed_out = 0
        return _on_device(batch, self._device)

    def close(self) -> None:
        """Ends the thread and the iteration."""
        self._futures.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def evaluation_batches(
    dataset: Dataset,
    samples: int,
    *,
    micro_batch: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yields (inputs, targets, count) for this rank's part of the samples 0 to samples - 1.

    Over all ranks the counts add up to `samples`, and each sample is counted once, whatever the
    world size: weight each mean loss by its count. Every rank gets equally many batches, as
    collective operations in the forward pass (ZeRO 3) require; one that has run out of samples gets
    a batch of one sample with count 0.
    """
    for base in range(0, samples, micro_batch * world_size):
        start = base + rank * micro_batch
        own = range(start, min(start + micro_batch, samples))
        batch = read_batch(dataset, own or range(1), device)
        yield (*_on_device(batch, device), len(own))


def read_batches(
    dataset: Dataset, first: int, micro_batch: int, stride: int, device: torch.device
) -> Iterator[Tensor]:
    """Endless: micro-batches of the samples from first, first + stride, first + 2 * stride, ...

    Each is as read_batch gives it, and costs much less: places are worked out and tokens copied for
    many at a time.
    """
    affordable = TOKENS_READ_TOGETHER // (dataset.sequence_length + 1)
    together = max(1, min(affordable, PLANNED_SAMPLES) // micro_batch)
    planned = together * max(1, PLANNED_SAMPLES // (together * micro_batch))
    for start in itertools.count(first, planned * stride):
        numbers = start + stride * np.arange(planned)[:, None] + np.arange(micro_batch)
        places = dataset.places(numbers.ravel())
        for group in np.split(places, planned // together):
            yield from _read_group(dataset, group, micro_batch, device)


def _read_group(
    dataset: Dataset, places: Numbers, micro_batch: int, device: torch.device
) -> Iterator[Tensor]:
    """Views of one buffer, a micro-batch each."""
    try:
        yield from _read(dataset, places, device).split(micro_batch)
    except ValueError:
        # A bad sample is an error when its batch is wanted, and the run may end before.
        for start in range(0, len(places), micro_batch):
            yield _read(dataset, places[start : start + micro_batch], device)


def read_batch(dataset: Dataset, samples: range, device: torch.device) -> Tensor:
    """int64 [samples, sequence_length + 1] in host memory, pinned if it is to go to a GPU."""
    return _read(dataset, dataset.places(np.array(samples)), device)


def _read(dataset: Dataset, places: Numbers, device: torch.device) -> Tensor:
    shape = len(places), dataset.sequence_length + 1
    batch = torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
    dataset.read(places, batch.numpy())
    return batch


def _on_device(batch: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    batch = batch.to(device, non_blocking=True)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
