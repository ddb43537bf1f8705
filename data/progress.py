"""The progress line of data/prepare.py."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from data.plan import Job

# Where standard error is a file, such as a batch job's log.
_LOG_SECONDS = 60.0


class PreparationProgress:
    """Documents, speeds and time left: a live line on a terminal, else a line a minute.

    Args:
        total: bytes of all jobs, on disk.
        done: of those, the bytes done before.
    """

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        self._started = self._logged = time.monotonic()
        self._before = done
        self._finished = [0, 0, 0]
        self._running: dict[int, tuple[int, tuple[int, int, int]]] = {}
        self._live = Progress(
            TextColumn("prepare"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._live.add_task("", total=total, completed=done, counts="")

    def report(self, job: Job, counts: tuple[int, int, int]) -> None:
        """Takes the documents, tokens and bytes of text of a job so far."""
        self._running[job.number] = (job.size, counts)
        self._show()

    def finish(self, job: Job) -> None:
        _, counts = self._running.pop(job.number, (0, (0, 0, 0)))
        self._finished = [a + b for a, b in zip(self._finished, counts, strict=True)]
        self._done += job.size
        self._show()

    def _show(self) -> None:
        documents, tokens, text = (
            total + sum(counts[i] for _, counts in self._running.values())
            for i, total in enumerate(self._finished)
        )
        # Bytes on disk for a byte of text, as far as is known: compressed files have fewer.
        ratio = (self._done - self._before) / self._finished[2] if self._finished[2] else 1.0
        completed = self._done + sum(
            min(size, round(counts[2] * ratio)) for size, counts in self._running.values()
        )
        seconds = max(1e-9, time.monotonic() - self._started)
        line = (
            f"{documents:,} documents, {text / seconds / 1e6:.1f} MB/s, "
            f"{tokens / seconds:,.0f} tokens/s"
        )
        self._live.update(self._task, completed=completed, counts=line)
        if self._live.disable and time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            share = completed / max(1, self._total)
            print(f"prepare: {share:.0%}, {line}", file=sys.stderr, flush=True)

    def __enter__(self) -> PreparationProgress:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()
