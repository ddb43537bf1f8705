"""What a run has left in its folder, read for a report."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.reading import flatten, read_json
from training import store
from training.tracking import LOG


@dataclass(frozen=True)
class RunLog:
    name: str
    training: list[dict[str, Any]]
    """Lines of metrics.jsonl by kind, in the order of their steps; at least one of these."""
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    config: dict[str, Any]
    """By dotted key."""
    plan: dict[str, Any]
    """memory_plan.json; empty where there is none."""
    versions: dict[str, str]
    """Of libraries, from the newest checkpoint; empty where there is none."""

    @property
    def sets(self) -> list[str]:
        """Keys of the validation losses: of their mean first, then of each set."""
        return sorted({key for line in self.evaluations for key in line} - {"step"})

    @property
    def planned_bytes(self) -> int:
        """The planned peak of one GPU."""
        return int(self.plan["gpu"]["peak_bytes"])

    def values(self, key: str) -> tuple[list[int], list[float]]:
        """Steps, and what was logged at each; NaN for what was no number."""
        lines = self.evaluations if key in self.sets else self.training
        found = [(line["step"], line[key]) for line in lines if key in line]
        numbers = [math.nan if value is None else float(value) for _, value in found]
        return [step for step, _ in found], numbers

    def tokens_at(self, step: int) -> float:
        """Tokens read up to a step, also to one between those logged."""
        steps = [0, *(line["step"] for line in self.training)]
        tokens = [0, *(line["tokens"] for line in self.training)]
        after = min(max(bisect_right(steps, step), 1), len(steps) - 1)
        rate = (tokens[after] - tokens[after - 1]) / (steps[after] - steps[after - 1])
        return float(tokens[after - 1] + rate * (step - steps[after - 1]))


def read_runs(folders: list[Path]) -> list[RunLog]:
    """Each by its folder's name; by its whole path where two have the same name.

    Raises:
        ValueError, OSError: a folder is given twice, is not a run's or holds no training step yet.
    """
    whole = [folder.resolve() for folder in folders]
    for folder in folders:
        if whole.count(folder.resolve()) > 1:
            raise ValueError(f"{folder}: given twice; expected different run folders")
    names = [folder.name for folder in whole]
    return [
        read_run(folder, folder.name if names.count(folder.name) == 1 else str(folder))
        for folder in whole
    ]


def read_run(folder: Path, name: str) -> RunLog:
    """Raises ValueError, OSError: the folder is not a run's or holds no training step yet."""
    for needed in ("config.json", LOG):
        if not (folder / needed).is_file():
            raise ValueError(
                f"{folder}: no run folder (it has no {needed}); expected the training.run_folder "
                "of a run that has begun"
            )
    lines = read_lines(folder / LOG)
    training = [line for line in lines if "loss" in line]
    if not training:
        raise ValueError(f"{folder / LOG}: holds no training step yet")
    plan = folder / "memory_plan.json"
    return RunLog(
        name=name,
        training=training,
        evaluations=[line for line in lines if "validation_loss" in line],
        events=[line for line in lines if "event" in line],
        config=flatten(read_json(folder / "config.json")),
        plan=read_json(plan) if plan.exists() else {},
        versions=_versions(folder),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a crash or a running process cut off is left out.

    Raises:
        ValueError: another one is not a line of a run.
    """
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.endswith("\n"):
            break
        try:
            line = json.loads(text)
            lines.append({**line, "step": int(line["step"])})
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f'{path}, line {number}: expected a JSON object with a "step", found {text[:60]!r}'
            ) from None
    return lines


def _versions(folder: Path) -> dict[str, str]:
    for checkpoint in store.candidates(folder / "checkpoints"):
        try:
            return store.read_manifest(checkpoint).versions
        except store.Damaged:
            continue
    return {}
