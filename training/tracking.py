"""What a run reports, to the console, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from training.store import naming, write_durably

Line = Mapping[str, float | int | None]
LOG = "metrics.jsonl"


class Event(NamedTuple):
    """Something that happened to a run between or in its steps."""

    kind: Literal["start", "resume", "policy", "skipped", "rollback"]
    words: str


class MetricsWriter:
    """Writes lines on rank 0; on other ranks it does nothing.

    Opened at a resumed step, it drops what an interrupted run had logged beyond it. Each method
    raises OSError, naming the file, where it cannot be written.
    """

    def __init__(self, run_folder: Path, *, start_step: int, max_steps: int, enabled: bool) -> None:
        self.enabled = enabled
        if not enabled:
            return
        # Imported here: only rank 0 pays for it.
        from torch.utils.tensorboard import SummaryWriter

        self._path, self._events = run_folder / LOG, run_folder / "tensorboard"
        first_step = start_step + 1 if start_step else 0
        drop_lines_from(self._path, first_step)
        self._lines = self._path.open("a", encoding="utf-8")
        with naming(self._events):
            self._tensorboard = SummaryWriter(
                str(self._events), purge_step=first_step, flush_secs=10
            )
        self._max_steps = max_steps
        console = Console(soft_wrap=True)
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=max_steps, completed=start_step)

    def training(self, line: Line) -> None:
        """One optimizer step: step, samples, tokens, loss, lr, grad_norm and what Speed reads."""
        self._write(line)
        if self.enabled:
            self._print(console_line(line, self._max_steps))

    def evaluation(self, step: int, losses: float | Mapping[str, float]) -> None:
        """The validation loss, or that of each set by name; their mean is then the validation loss.

        A single set has the name "".
        """
        if not isinstance(losses, Mapping):
            losses = {"": losses}
        loss = sum(losses.values()) / len(losses)
        named = {f"validation_loss/{name}": value for name, value in losses.items() if name}
        self._write({"step": step, "validation_loss": loss, **named})
        if self.enabled:
            perplexity = math.exp(min(loss, 700))
            each = ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if name)
            self._print(
                f"step {step:>6}  validation loss {loss:.4f}"
                f"{f', the mean of {each}' if each else ''}  perplexity {perplexity:,.1f}"
            )

    def event(self, step: int, event: Event) -> None:
        if self.enabled:
            self._append({"step": step, "kind": event.kind, "event": event.words})
            self._print(f"step {step:>6}  {event.words}")

    def step(self, step: int) -> None:
        """Move the progress bar."""
        if self.enabled:
            self._bar.update(self._task, completed=step)

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def _write(self, line: Line) -> None:
        if not self.enabled:
            return
        # NaN and infinity are no JSON.
        finite = {k: None if v is None or not math.isfinite(v) else v for k, v in line.items()}
        self._append(finite)
        with naming(self._events):
            for name, value in line.items():
                if name != "step" and value is not None:
                    group = "evaluation" if name.startswith("validation_loss") else "training"
                    self._tensorboard.add_scalar(f"{group}/{name}", value, line["step"])
            self._tensorboard.flush()

    def _append(self, line: Mapping[str, Any]) -> None:
        with naming(self._path):
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()

    def sync(self) -> None:
        """Onto the disk, before a checkpoint that continues behind these lines."""
        if self.enabled:
            with naming(self._path):
                os.fsync(self._lines.fileno())

    def close(self) -> None:
        if self.enabled:
            self._bar.stop()
            with naming(self._path):
                self._lines.close()
            with naming(self._events):
                self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drop_lines_from(path: Path, step: int) -> None:
    """Drop the lines of this step and later ones, and what a crash left of a line.

    The file is replaced: a crash meanwhile leaves the old one.
    """
    if not path.exists():
        return
    kept = [
        text
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if text.endswith("\n") and _step_of(text) < step
    ]
    write_durably(path, "".join(kept))


def _step_of(text: str) -> float:
    """Infinite for what is not a line of ours."""
    try:
        return int(json.loads(text)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def console_line(line: Mapping[str, Any], max_steps: int) -> str:
    mfu = "" if line["mfu"] is None else f"  mfu {line['mfu']:.1%}"
    norm = "" if line["grad_norm"] is None else f"  grad norm {line['grad_norm']:.3f}"
    remaining = int((max_steps - line["step"]) * line["step_seconds"])
    return (
        f"step {line['step']:>6}/{max_steps}  loss {line['loss']:.4f}  lr {line['lr']:.2e}{norm}"
        f"  {line['tokens_per_second']:,.0f} tokens/s{mfu}"
        f"  memory {line['memory_peak_bytes'] / 2**30:.2f} GiB"
        f"  left {remaining // 3600}:{remaining // 60 % 60:02}:{remaining % 60:02}"
    )
