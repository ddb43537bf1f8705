"""Command: the training samples of a step, or by number, and their text.

python -m training.samples --run runs/quickstart --step 120
python -m training.samples --run runs/quickstart --samples 952-959
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.schema import RunConfig, load_config
from data.dataset import Blend
from data.skipping import Skipping
from data.tokenizer import load_tokenizer
from training import store
from training.setup import open_data

EXCERPT = 200
"""Characters of a sample in a report."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m training.samples --run runs/quickstart --step 120",
    )
    parser.add_argument("--run", required=True, type=Path, help="a run folder")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--step", type=int)
    wanted.add_argument("--samples", metavar="FIRST-LAST", help="sample numbers, both included")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.run / "config.json")
        data, _ = open_data(config)
        for number in numbers(options, config, data):
            corpus, _ = data.locate(number)
            print(f"--- sample {number}, of {data.corpora[corpus].file.bin_path}")
            print(text_of(data, number, config.data.tokenizer))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def numbers(options: argparse.Namespace, config: RunConfig, data: Blend) -> list[int]:
    if options.samples:
        parts = re.fullmatch(r"(\d+)(?:-(\d+))?", options.samples)
        if parts is None:
            raise ValueError(f"--samples {options.samples}: expected FIRST-LAST, as in 952-959")
        first, last = int(parts[1]), int(parts[2] or parts[1])
        return list(range(first, last + 1))
    if options.step < 1:
        raise ValueError(f"--step {options.step}: the first step is 1")
    batch = samples_per_step(options.run)
    order = Skipping(data, skipped_so_far(options.run) + config.training.skip_samples)
    return [order.number(n) for n in range((options.step - 1) * batch, options.step * batch)]


def samples_per_step(run_folder: Path) -> int:
    path = run_folder / "metrics.jsonl"
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "samples" in line:
            return int(line["samples"] // line["step"])
    raise ValueError(f"{path}: no step has been logged yet; name samples by --samples")


def skipped_so_far(run_folder: Path) -> list[list[int]]:
    """By hand and by rollbacks, up to the newest checkpoint."""
    for path in store.candidates(run_folder / "checkpoints"):
        try:
            return list(store.read_manifest(path).progress["skipped_samples"])
        except store.Damaged:
            continue
    return []


def text_of(data: Blend, number: int, tokenizer: str | None) -> str:
    """A sample's text; its token ids where there is no tokenizer.

    Args:
        tokenizer: of corpora that other tools have prepared, which do not keep one.
    """
    corpus, _ = data.locate(number)
    ids = data.sample(number).tolist()
    file = data.corpora[corpus].file
    path = file.bin_path.parent if file.manifest else tokenizer
    try:
        return load_tokenizer(path, fast=False).decode(ids) if path else f"tokens {ids}"
    except (OSError, ValueError):
        return f"tokens {ids}"


def excerpt(data: Blend, number: int, tokenizer: str | None) -> str:
    return text_of(data, number, tokenizer)[:EXCERPT]


if __name__ == "__main__":
    sys.exit(main())
