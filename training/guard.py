"""Every step is judged before its update: by its loss, its gradients, and whether to go on.

Ranks agree by one collective a step, which also carries the mean loss. It is queued before the last
backward pass and read when the step is done, so that nothing waits for it on a GPU.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.spikes import Spikes
from training.stop import REASONS, Stop
from training.store import naming
from training.tracking import Event, MetricsWriter

REPORT = "bad_steps.json"


class BadSteps(Exception):
    """The run has to stop: its steps stay bad. In one line, with where to read more."""


class RollBack(Exception):
    """A spike, from which the run goes back to its last checkpoint."""

    def __init__(self, step: int, samples_consumed: int) -> None:
        super().__init__(step, samples_consumed)
        self.step = step
        self.samples_consumed = samples_consumed
        """Before and in the spike's step."""


@dataclass(frozen=True)
class Finding:
    """Where a repeated step became non-finite."""

    rank: int
    micro_batch: int
    when: str
    """"forward" or "backward"."""
    place: str
    """"embedding", "block 3" or "head"."""
    tensors: list[str]
    samples: list[int]
    text: list[str] = field(default_factory=list)
    """Excerpts of the samples."""

    @property
    def order(self) -> tuple[int, int, int]:
        return self.when != "forward", self.micro_batch, self.rank

    def __str__(self) -> str:
        return (
            f"{self.place} {self.when}, {self.tensors[0]}, micro-batch {self.micro_batch} of rank "
            f"{self.rank}, samples {self.samples[0]} to {self.samples[-1]}"
        )


class Agreement:
    """What the ranks tell each other about a step. They get the same bits, so they decide alike."""

    def __init__(self, device: torch.device, stop: Stop) -> None:
        self._stop = stop
        self._ranks = torch.distributed.get_world_size()
        on_gpu = device.type == "cuda"
        self._told = torch.zeros(2 + len(REASONS), pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None

    def reach(self, loss: Tensor, bound: float) -> Tensor:
        """A collective: whether the mean of the ranks' losses is below the bound, as 1 or NaN."""
        told = torch.zeros(2 + len(REASONS), device=loss.device)
        told[0] = loss
        for place, wish in enumerate(self._stop.wishes(), 2):
            if wish:
                told[place].fill_(1.0)
        torch.distributed.all_reduce(told)
        told[1] = torch.where(told[0] < bound * self._ranks, 1.0, math.nan)
        self._told.copy_(told, non_blocking=True)
        if self._arrived:
            self._arrived.record()
        return told[1]

    def read(self) -> tuple[float, bool, str | None]:
        """The mean loss, whether it was below the bound, and why to stop."""
        if self._arrived:
            self._arrived.synchronize()
        loss, factor, *wishes = self._told.tolist()
        stop = next((reason for reason, count in zip(REASONS, wishes, strict=True) if count), None)
        return loss / self._ranks, not math.isnan(factor), stop


@dataclass(frozen=True)
class Outcome:
    loss: float
    """Mean over ranks."""
    stop: str | None
    """Why the run ends after this step."""


class Guard:
    """Leaves bad steps out, and counts, explains and limits them.

    Args:
        investigate: a collective that repeats a step, given its number and the samples consumed
            before it.
        limit: bad steps in a row that end the run.
        rolls_back: whether a spike leads back to a checkpoint.
        folder: of the run.
    """

    def __init__(
        self,
        engine: Any,
        stop: Stop,
        spikes: Spikes,
        writer: MetricsWriter,
        *,
        investigate: Callable[[int, int], list[Finding]],
        limit: int,
        rolls_back: bool,
        folder: Path,
    ) -> None:
        self._engine, self._writer, self._folder = engine, writer, folder
        self._agreement = Agreement(engine.device, stop)
        self._investigate = investigate
        self._limit, self._rolls_back = limit, rolls_back
        self._in_a_row = 0
        self._scales: deque[tuple[int, float]] = deque(maxlen=100)
        self._reports: deque[dict[str, Any]] = deque(maxlen=limit)
        self.spikes = spikes
        self.has_checkpoint = False
        """Whether there is one to roll back to."""

    def scale(self) -> dict[str, float]:
        """fp16's loss scale, for a line of the metrics; nothing for other precisions."""
        return {"loss_scale": self._scales[-1][1]} if self._scales else {}

    def judge(self, loss: Tensor) -> Tensor:
        """For training.engine.train_step."""
        return self._agreement.reach(loss, self.spikes.bound)

    def outcome(self, step: int, samples_before: int, samples_after: int) -> Outcome:
        """Of the step that has just been taken, or left out.

        Raises:
            RollBack: it was a spike, and the run is to go back.
            BadSteps: it was one bad step too many.
        """
        bound = self.spikes.bound
        loss, below, stop = self._agreement.read()
        scale = loss_scale(self._engine)
        if scale is not None:
            self._scales.append((step, scale))
        if self._engine.was_step_applied():
            self._in_a_row = 0
            self.spikes.add(loss)
            return Outcome(loss, stop)
        self._in_a_row += 1
        spiked = not below and math.isfinite(loss)
        if spiked:
            reason = f"loss {loss:.4f} is a spike, from {bound:.4f} on"
        else:
            reason = f"non-finite {'gradients' if below else 'loss'}"
        if spiked and self._rolls_back and self.has_checkpoint:
            raise RollBack(step, samples_after)
        last = self._in_a_row == self._limit
        # fp16 overflows now and then, which is how its loss scale is found.
        usual = scale is not None and below
        unexplained = not spiked and (last or (self._in_a_row == 1 and not usual))
        findings = self._investigate(step, samples_before) if unexplained else []
        self._report(step, reason, loss, [samples_before, samples_after], findings)
        if last:
            raise BadSteps(
                f"{self._in_a_row} bad steps in a row, the last of them step {step}: {reason}; "
                f"{self._folder / REPORT} says more" + self._advice(scale)
            )
        return Outcome(loss, stop)

    def _advice(self, scale: float | None) -> str:
        if scale is None:
            return "; lower the learning rate, or look at the samples"
        scales = ", ".join(f"{scale:g}" for _, scale in list(self._scales)[-8:])
        return f"; loss scales so far {scales}: use bf16, or lower the learning rate"

    def _report(
        self, step: int, reason: str, loss: float, consumed: list[int], findings: list[Finding]
    ) -> None:
        first = f": {findings[0]}" if findings else ""
        self._writer.event(step, Event("skipped", f"update skipped, {reason}{first}"))
        self._reports.append(
            {
                "step": step,
                "reason": reason,
                "loss": loss if math.isfinite(loss) else str(loss),
                "samples_consumed_before_and_after": consumed,
                "findings": [asdict(finding) for finding in findings],
            }
        )
        if self._writer.enabled:
            report = {"bad_steps": list(self._reports), "loss_scales": list(self._scales)}
            text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
            with naming(self._folder / REPORT):
                (self._folder / REPORT).write_text(text, encoding="utf-8")


def loss_scale(engine: Any) -> float | None:
    """fp16's; None for other precisions."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None
