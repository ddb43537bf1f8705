"""Command: does a run resume exactly, with this config, on this machine?

    python -m training.verify_resume --config configs/quickstart.json --steps 10
    python -m training.verify_resume --config configs/20b.json --launch "deepspeed --num_gpus 8"

Trains the config for some steps with a checkpoint in the middle, resumes a copy of the run from
there in new processes, and compares every loss and every tensor of the last checkpoints to the bit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.reading import ConfigError
from configs.schema import load_config
from training.say import fail
from training.unpickling import load_states

TRAIN = Path(__file__).parents[1] / "train.py"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        if options.steps < 2:
            raise ValueError(f"--steps {options.steps}: expected 2 or more")
        folder = Path(f"{config.training.run_folder}.verify-resume")
        if folder.exists():
            raise ValueError(f"{folder} exists: remove it, it is of an earlier verification")
    except (ConfigError, ValueError) as error:
        return fail(error, 2)
    whole, resumed = folder / "whole", folder / "resumed"
    try:
        _train(options, whole)
        _copy_half(whole, resumed, options.steps)
        _train(options, resumed)
    except subprocess.CalledProcessError as error:
        return fail(RuntimeError(f"exit {error.returncode} of: {shlex.join(error.cmd)}"), 1)
    problems = [*_differing_losses(whole, resumed), *differing_tensors(whole, resumed)]
    for problem in problems:
        print(f"differs: {problem}")
    half, verdict = options.steps // 2, "NOT exact" if problems else "exact"
    print(
        f"resuming at step {half} of {options.steps} is {verdict}: losses of the steps {half + 1} "
        f"to {options.steps}, weights and optimizer states"
    )
    if problems:
        print(f"both runs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def _train(options: argparse.Namespace, run_folder: Path) -> None:
    changes = {
        "run_folder": run_folder,
        "max_steps": options.steps,
        "save_interval": options.steps // 2,
        "log_interval": 1,
    }
    overrides = options.overrides + [f"training.{key}={value}" for key, value in changes.items()]
    command = [*shlex.split(options.launch), str(TRAIN), "--config", options.config]
    command += [word for override in overrides for word in ("--set", override)]
    subprocess.run(command, check=True)


def _copy_half(whole: Path, resumed: Path, steps: int) -> None:
    """The run as it was when its middle checkpoint had been written."""
    half = f"step-{steps // 2:08}"
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copy2(whole / "config.json", resumed)
    shutil.copy2(whole / "metrics.jsonl", resumed)
    shutil.copytree(whole / "checkpoints" / half, resumed / "checkpoints" / half)
    (resumed / "checkpoints" / "latest").write_text(half, encoding="utf-8")


def _differing_losses(whole: Path, resumed: Path) -> Iterator[str]:
    expected, found = (_losses(folder / "metrics.jsonl") for folder in (whole, resumed))
    for step in sorted(expected.keys() | found.keys()):
        if expected.get(step) != found.get(step):
            yield f"loss of step {step}: {expected.get(step)}, resumed {found.get(step)}"


def _losses(path: Path) -> dict[int, float]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def differing_tensors(whole: Path, resumed: Path) -> Iterator[str]:
    """File and key of each tensor of the newest checkpoints that differs in a bit."""
    name = (whole / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    for path in sorted((whole / "checkpoints" / name).rglob("*.pt")):
        other = resumed / path.relative_to(whole)
        if not other.exists():
            yield f"{other} is missing"
            continue
        ours, theirs = (load_states(p, mmap=True) for p in (path, other))
        expected, found = dict(_tensors(ours)), dict(_tensors(theirs))
        for key in sorted(expected.keys() | found.keys()):
            if key not in expected or key not in found or not _same(expected[key], found[key]):
                yield f"{path.name}: {key}"


def _tensors(node: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield path, node
    elif isinstance(node, dict | list | tuple):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield from _tensors(value, f"{path}.{key}" if path else str(key))


def _same(a: Tensor, b: Tensor) -> bool:
    """To the bit: also where both are the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.verify_resume",
        description="Tells whether a run of this config resumes to the bit.",
        epilog="example: python -m training.verify_resume --config configs/quickstart.json",
    )
    parser.add_argument("--config", required=True, help="the run's JSON file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the config (repeatable)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    parser.add_argument(
        "--launch", default=sys.executable, metavar="COMMAND",
        help='what starts train.py, as in "deepspeed --num_gpus 8" (default: this python)',
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
