"""Saving beside the step loop: when a save begins, what becomes of it, and that all ranks agree.

Each rank copies its states and a thread of its own writes them. Threads never talk to each other:
while a save is under way the ranks compare their threads' states once a step, in the step loop.
When all have written, rank 0's thread writes the manifest and gives the folder its name.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from memory.machine import show_bytes
from training import store
from training.checkpoint import Progress
from training.pulse import Pulse
from training.setup import Run
from training.writer import Writer

UNDER_WAY, DONE, FAILED = range(3)
MARGIN = 1.02
"""Files are this much larger than the tensors in them, at most, beside MARGIN_BYTES."""
MARGIN_BYTES = 1 << 20
ADVICE = "; free space or mend the file system, then run the same command again"
WORTH_SAYING = 0.5
"""Seconds."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written, and the run is to stop for it."""


@dataclass
class Save:
    progress: Progress
    folder: Path
    """Until it is complete."""
    job: Future[Any] | None = None
    finishing: bool = False
    """The job is no longer to write this rank's files, but to complete the folder."""
    began: float = field(default_factory=time.monotonic)


class Saver:
    """Saves a run's checkpoints. All methods are collective: every rank calls them at one step."""

    def __init__(self, engine: Any, run: Run, pulse: Pulse) -> None:
        self.engine, self.run, self._pulse = engine, run, pulse
        self.settings = run.config.training
        self.checkpoints = Path(self.settings.run_folder) / "checkpoints"
        self.writer = Writer(copies=self.settings.save_in_background)
        engine.checkpoint_engine = self.writer
        # A script that unpickles without restriction, copied without a word of a full disk.
        engine._copy_recovery_script = lambda folder: None
        self.group = dist.new_group(backend="gloo")  # on a GPU, NCCL would wait for the step
        self._save: Save | None = None
        """The one under way."""
        self._unsaved: Progress | None = None
        """Of the newest save, if it failed."""

    def save(self, progress: Progress) -> None:
        """Begin a save; in the foreground, also end it. Waits for the one before.

        Raises:
            SaveFailed: one failed, and training.on_failed_save is "stop".
        """
        self._wait_for_the_one_before()
        self._unsaved = None
        folder = self.checkpoints / (store.UNFINISHED + store.name_of(progress.step))
        save = self._save = Save(progress, folder)
        if reason := self._from_rank_0(lambda: self._make(folder)):
            return self._fail(save, [reason])
        self.engine.save_checkpoint(str(self.checkpoints), tag=folder.name, save_latest=False)
        needed = int(sum(self._gather(self.writer.size())) * MARGIN) + MARGIN_BYTES
        if reason := self._from_rank_0(lambda: self._lack_of_room(needed)):
            return self._fail(save, [reason])
        save.job = self._start(self.writer.write)
        if not self.settings.save_in_background:
            self.settle()
        return None

    def poll(self) -> None:
        """Between two steps: see whether the save under way is done, and say if it failed.

        Raises:
            SaveFailed: it failed, and training.on_failed_save is "stop".
        """
        save = self._save
        if save is None:
            return
        assert save.job
        states = self._gather_states(save.job)
        if UNDER_WAY in states:
            return
        if FAILED in states:
            self._fail(save, [reason for reason in self._gather(self._reason(save.job)) if reason])
        elif save.finishing:
            self._save = None
            self._pulse.add("save in all", time.monotonic() - save.began)
        else:
            files = self._gather(save.job.result())
            save.finishing = True
            is_first = self.run.ranks.rank == 0
            save.job = self._start(lambda: self._finish(save, files) if is_first else None)

    def close(self) -> None:
        """End the save under way. One that failed at the last step is tried once more.

        Raises:
            SaveFailed: the state at the last step is not saved.
        """
        self.settle()
        if self._unsaved:
            self.save(self._unsaved)
            self.settle()
        if self._unsaved:
            raise SaveFailed(f"step {self._unsaved.step} is not saved{ADVICE}")

    def _wait_for_the_one_before(self) -> None:
        if self._save:
            step, began = self._save.progress.step, time.monotonic()
            self.settle()
            waited = time.monotonic() - began
            if waited > WORTH_SAYING:
                self._say(f"warning    waited {waited:.1f} s for the save at step {step}")

    def settle(self) -> None:
        """Wait until no save is under way.

        Raises:
            SaveFailed: as `poll`.
        """
        while self._save and self._save.job:
            wait([self._save.job])
            self.poll()

    def _start(self, work: Callable[[], Any]) -> Future[Any]:
        future = Future[Any]()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        if self.settings.save_in_background:
            Thread(target=run, name="checkpoint", daemon=True).start()
        else:
            run()
        return future

    def _finish(self, save: Save, files: list[dict[str, store.Written]]) -> None:
        """On rank 0, when all files are on disk."""
        run = self.run
        manifest = store.Manifest(
            progress=asdict(save.progress),
            zero_stage=self.engine.zero_optimization_stage(),
            tensor_parallel=run.ranks.tensor_parallel,
            precision=str(next(self.engine.module.parameters()).dtype).removeprefix("torch."),
            versions={"torch": torch.__version__, "deepspeed": deepspeed.__version__},
            config=store.as_json(run.asked.model_dump()),
            deepspeed=store.as_json(run.section),
            files={name: written for part in files for name, written in part.items()}
            | store.others(save.folder, files),
        )
        store.complete(save.folder, manifest)
        if self.settings.keep_last is not None:
            try:
                store.prune(self.checkpoints, self.settings.keep_last, self.settings.keep_every)
            except OSError as error:
                if self.settings.on_failed_save == "stop":
                    raise
                print(f"warning    an old checkpoint cannot be deleted: {error}", flush=True)

    def _make(self, folder: Path) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()

    def _lack_of_room(self, needed: int) -> str | None:
        free = shutil.disk_usage(self.checkpoints).free
        if free >= needed:
            return None
        return f"{self.checkpoints}: {show_bytes(needed)} needed, {show_bytes(free)} free"

    def _reason(self, job: Future[Any]) -> str | None:
        """Why this rank's thread failed; what is no trouble of storage is an error of ours.

        Raises:
            Exception: the thread's own.
        """
        error = job.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        return None if error is None else f"rank {self.run.ranks.rank}: {error}"

    def _fail(self, save: Save, reasons: list[str]) -> None:
        """Give the save up: all ranks are done with its folder."""
        if self.run.ranks.rank == 0:
            shutil.rmtree(save.folder, ignore_errors=True)  # else the next save or run removes it
        self._save, self._unsaved = None, save.progress
        intact = store.pointed_at(self.checkpoints) or "no checkpoint yet"
        reason = "; ".join(reasons)
        lines = f"save at step {save.progress.step} failed: {reason}; newest complete: {intact}"
        if self.settings.on_failed_save == "stop":
            raise SaveFailed(f"{lines}{ADVICE}")
        self._say(f"warning    {lines}; the run goes on, and saves at the next save_interval")

    def _from_rank_0(self, ask: Callable[[], str | None]) -> str | None:
        """What is in the way, if something is: its answer, or its error."""
        answer = None
        if self.run.ranks.rank == 0:
            try:
                answer = ask()
            except OSError as error:
                answer = f"rank 0: {error}"
        answers = [answer]
        dist.broadcast_object_list(answers, src=0, group=self.group)
        return answers[0]

    def _gather(self, value: Any) -> list[Any]:
        """Of every rank."""
        values = [None] * self.run.ranks.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _gather_states(self, job: Future[Any]) -> set[int]:
        """The lowest and the highest of all ranks' threads, by one all-reduce of two numbers."""
        state = UNDER_WAY
        if job.done():
            state = FAILED if job.exception() else DONE
        bounds = torch.tensor([state, -state])
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=self.group)
        return {int(bounds[0]), -int(bounds[1])}

    def _say(self, line: str) -> None:
        if self.run.ranks.rank == 0:
            print(line, flush=True)
