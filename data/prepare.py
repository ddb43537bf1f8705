"""Command: from sources to token files.

    python -m data.prepare --source python-stdlib --tokenizer tokenizer.model --output corpus

writes corpus/train.bin and .idx, validation.bin and .idx, a copy of the tokenizer and
manifest.json. Every document ends with the end-of-document token. Documents of zero characters, or
of zero tokens, are skipped and counted; whitespace is text like any other. Which documents are held
out for validation depends on their text alone. Documents stay in the order of the sources as given
and of their files' names, so that the output is the same, to the byte, for any number of workers.

The work is done in OUTPUT.partial, which a call that was killed leaves behind; the same command
then goes on from it. Where one machine is too slow, `--shard i/n` makes one of n parts, i from 0 to
n - 1, and `python -m data.merge` joins them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

from data.encoding import Options
from data.manifest import Inputs, ShardRecord
from data.partial import run_command
from data.plan import Plan, make_plan
from data.preparation import prepare
from data.prepared import find_prepared, print_report
from data.sources import Invalid, Reading, read_chunk
from data.tokenizer import load_tokenizer

# What a tokenizer's fast backend is compared with its reference on.
_SAMPLE_PIECES, _SAMPLE_CHARACTERS = 64, 4096


def _text_sample(plan: Plan, reading: Reading) -> tuple[str, ...]:
    """Text from the first documents."""
    items = (item for chunk in plan.chunks for item in read_chunk(chunk, reading))
    return tuple(
        item.text[:_SAMPLE_CHARACTERS]
        for item in itertools.islice(items, _SAMPLE_PIECES)
        if not isinstance(item, Invalid)
    )


def _shard(text: str) -> tuple[int, int]:
    try:
        number, count = map(int, text.split("/"))
    except ValueError:
        raise ValueError(f"--shard {text}: expected i/n, such as 0/4") from None
    if not 0 <= number < count:
        raise ValueError(f"--shard {text}: shards of {count} have the numbers 0 to {count - 1}")
    return number, count


def _run(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.validation_fraction < 1:
        raise ValueError(
            f"--validation-fraction {arguments.validation_fraction}: expected 0 or more, below 1"
        )
    if arguments.workers < 1:
        raise ValueError(f"--workers {arguments.workers}: expected 1 or more")
    shard = None if arguments.shard is None else _shard(arguments.shard)
    reading = Reading(
        tuple(arguments.source), arguments.text_key, arguments.split, arguments.streaming
    )
    plan = make_plan(reading, shard)
    tokenizer = load_tokenizer(
        arguments.tokenizer,
        end_of_document=arguments.end_of_document,
        sample=_text_sample(plan, reading),
    )
    if not tokenizer.lossless:
        print(f"warning: {tokenizer.path} does not keep text to the byte", file=sys.stderr)
    for notice in tokenizer.notices:
        print(f"notice: {notice}", file=sys.stderr)
    options = Options(
        reading=reading,
        validation_fraction=arguments.validation_fraction,
        skip_invalid=arguments.skip_invalid,
        deduplicate=arguments.deduplicate,
    )
    inputs = Inputs(
        sources=plan.sources,
        tokenizer=tokenizer.identity,
        text_key=reading.text_key,
        split=reading.split,
        streaming=reading.streaming,
        skip_invalid=options.skip_invalid,
        deduplicate=options.deduplicate,
        validation_fraction=options.validation_fraction,
    )
    record = ShardRecord(number=shard[0], count=shard[1], plan=plan.digest) if shard else None
    output = arguments.output
    manifest = find_prepared(output, inputs, record)
    if manifest is not None:
        print_report(manifest, output, "already prepared: ")
        return
    manifest = prepare(plan, inputs, record, options, tokenizer, output, arguments.workers)
    print_report(manifest, output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        description="Turns text into token files for training. Run again after it was killed, the "
        "same command goes on from where it was.",
        epilog="example: python -m data.prepare --source python-stdlib --tokenizer tokenizer.model "
        "--output corpus",
    )
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        help=".txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow file, a folder or pattern of "
        "them, hf:NAME for a Hugging Face dataset, or python-stdlib; may be given repeatedly",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        help="sentencepiece .model, tokenizer.json, or folder of one",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)"
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.01,
        help="share of the documents held out (default: %(default)s)",
    )
    parser.add_argument("--text-key", default="text", help="key or column that holds the text")
    parser.add_argument("--split", default="train", help="of Hugging Face datasets")
    parser.add_argument(
        "--streaming", action="store_true", help="read Hugging Face datasets without a copy on disk"
    )
    parser.add_argument(
        "--end-of-document", metavar="TOKEN", help="where the tokenizer does not name its own"
    )
    parser.add_argument(
        "--skip-invalid", action="store_true", help="leave out and list invalid documents"
    )
    parser.add_argument(
        "--deduplicate", action="store_true", help="keep the first of documents of equal text"
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="prepare one of N parts, I from 0 to N - 1, to be joined with `python -m data.merge`; "
        "in a SLURM array: $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT",
    )
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
