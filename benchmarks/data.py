"""Text to tokens and tokens to batches: ours, other tools, and what the machine allows.

    python -m benchmarks.data --output benchmarks/results/data_CPU_DATE.md

The text is the Python standard library's, repeated to --megabytes of JSON lines in two files, and
the tokenizer a byte-level BPE trained on it. All tools use two processes and are commands, timed
from their start to their end: what starting takes shows in a run on a single short document.
The ids of all are compared before anything is timed. datatrove takes part where it is installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.data_peers import WORKERS
from benchmarks.data_reading import reading
from benchmarks.measure import Contender, Timing, interleave, ratio, report, spread
from data.sources import Reading, read_documents
from data.token_file import TokenFile
from data.train_tokenizer import BYTE_LEVEL_BPE, train_tokenizer

VOCABULARY = 32_000
FAST, REFERENCE = "data.prepare, fast encoder", "data.prepare, `tokenizers`"
DATASETS, DATATROVE = "datasets.map", "datatrove"
OURS = ["-m", "data.prepare"]
# An absent package is one that cannot be imported.
OURS_WITHOUT_FAST = [
    "-c",
    "import sys; sys.modules['gigatoken'] = None; from data.prepare import main; sys.exit(main())",
]


def write_corpus(folder: Path, megabytes: float) -> int:
    """Writes two files of JSON lines and the tokenizer; returns the bytes of their text."""
    documents = list(read_documents(Reading(("python-stdlib",))))
    train_tokenizer(documents, VOCABULARY, folder / "tokenizer.json", kind=BYTE_LEVEL_BPE)
    wanted, written = megabytes * 1e6, 0
    endless = itertools.cycle(documents)
    for number in (1, 2):
        with (folder / f"{number}.jsonl").open("w", encoding="utf-8") as stream:
            while written < wanted * number / 2:
                text = next(endless)
                if text:
                    written += len(text.encode())
                    stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return written


def write_short_corpus(folder: Path, tokenizer_json: Path) -> None:
    folder.mkdir()
    shutil.copy(tokenizer_json, folder / "tokenizer.json")
    for number in (1, 2):
        (folder / f"{number}.jsonl").write_text('{"text": "short"}\n')


def run_tool(name: str, folder: Path, output: Path) -> None:
    """One command, whose output folder is made anew."""
    shutil.rmtree(output, ignore_errors=True)
    if name in (FAST, REFERENCE):
        command = [
            *(OURS if name == FAST else OURS_WITHOUT_FAST),
            *("--source", str(folder), "--tokenizer", str(folder / "tokenizer.json")),
            *("--output", str(output), "--workers", str(WORKERS), "--validation-fraction", "0"),
        ]
    else:
        output.mkdir()
        peer = {DATASETS: "datasets", DATATROVE: "datatrove"}[name]
        command = ["-m", "benchmarks.data_peers", peer, str(folder), str(output)]
    # Every tool has its own processes: threads beside them would only add to them.
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")


def tokens_of(name: str, output: Path) -> np.ndarray[Any, Any]:
    if name in (FAST, REFERENCE):
        file = TokenFile(output / "train")
        return file.tokens(0, file.token_count)
    if name == DATATROVE:
        files = sorted((output / "tokens").glob("*.ds"))
        return np.concatenate([np.fromfile(file, np.uint16) for file in files])
    import datasets

    parts = sorted(output.glob("mapped*.arrow"))
    return np.concatenate(
        [
            datasets.Dataset.from_file(str(part)).data.column("ids").combine_chunks().values
            for part in parts
        ]
    )


def check_equal_ids(tools: list[str], folder: Path, scratch: Path) -> int:
    """Runs each tool once; returns the number of tokens."""
    expected: np.ndarray[Any, Any] | None = None
    for name in tools:
        run_tool(name, folder, scratch / "checked")
        found = tokens_of(name, scratch / "checked")
        if expected is not None and not np.array_equal(expected, found):
            raise RuntimeError(f"{name} gives other ids than {tools[0]}")
        expected = found
    assert expected is not None
    return len(expected)


def encode_in_memory(folder: Path) -> Callable[[], None]:
    """The tokenizer's own threads, on text that is in memory; the ids are thrown away."""
    os.environ["RAYON_NUM_THREADS"] = str(WORKERS)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [orjson.loads(line)["text"] for line in _lines(folder)]

    def run() -> None:
        for start in range(0, len(texts), 256):
            tokenizer.encode_batch_fast(texts[start : start + 256])

    return run


def _lines(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as stream:
            yield from stream


def parse_json(folder: Path) -> None:
    for line in _lines(folder):
        orjson.loads(line)


def write_to_disk(path: Path, size: int) -> None:
    with path.open("wb") as stream:
        stream.write(bytes(size))
        stream.flush()
        os.fsync(stream.fileno())


def preparation(folder: Path, scratch: Path, megabytes: float, rounds: int) -> list[str]:
    """The table of tools and limits."""
    text_bytes = write_corpus(folder, megabytes)
    write_short_corpus(scratch / "short", folder / "tokenizer.json")
    tools = [FAST, REFERENCE, DATASETS]
    if importlib.util.find_spec("datatrove"):
        tools.append(DATATROVE)
    tokens = check_equal_ids(tools, folder, scratch)
    memory = Contender(functools.partial(encode_in_memory, folder))
    contenders: dict[str, Callable[[], Any]] = {
        name: functools.partial(run_tool, name, folder, scratch / "out") for name in tools
    }
    starts = {
        name: functools.partial(run_tool, name, scratch / "short", scratch / "out")
        for name in tools
    }
    limits: dict[str, Callable[[], Any]] = {
        f"`tokenizers` in memory, {WORKERS} threads": memory,
        "orjson alone, 1 thread": functools.partial(parse_json, folder),
        "disk: the tokens' bytes, with fsync": functools.partial(
            write_to_disk, scratch / "raw", 2 * tokens
        ),
    }
    timings = interleave({**contenders, **limits}, rounds)
    memory.close()
    start_timings = interleave(starts, min(rounds, 5))
    lines = [
        f"{text_bytes / 1e6:.0f} MB of text, {tokens:,} tokens of {VOCABULARY:,}; all tools gave "
        "the same ids.",
        "",
        "| from JSON lines to tokens on disk, 2 processes | MB/s | its start, s | "
        f"time against {FAST} |",
        "|---|---|---|---|",
    ]
    for name in tools:
        lines.append(
            f"| {name} | {_rate(text_bytes, timings[name])} | "
            f"{_seconds(start_timings[name])} | {ratio(timings[name], timings[FAST])} |"
        )
    if DATATROVE not in tools:
        lines.append("| datatrove | not installed | | |")
    lines += ["", "| limits | MB/s of text |", "|---|---|"]
    lines += [f"| {name} | {_rate(text_bytes, timings[name])} |" for name in limits]
    return lines


def _rate(text_bytes: int, timings: list[Timing]) -> str:
    rates = spread([text_bytes / 1e6 / timing.seconds for timing in timings])
    return f"{rates.median:.1f} ({rates.low:.1f} to {rates.high:.1f})"


def _seconds(timings: list[Timing]) -> str:
    return f"{spread([timing.seconds for timing in timings]).median:.2f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=64, help="of text (default: 64)")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "corpus")
        folder.mkdir()
        lines = preparation(folder, Path(scratch), options.megabytes, options.rounds)
        lines += ["", *reading(Path(scratch), options.rounds)]
    report("Data: text to tokens, tokens to batches", lines, options.output)


if __name__ == "__main__":
    main()
