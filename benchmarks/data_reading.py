"""The reading half of benchmarks/data.py: batches in random order, and opening large corpora."""

from __future__ import annotations

import functools
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import interleave, ratio, spread
from data.dataset import Blend, Corpus
from data.loader import read_batches
from data.token_file import TokenFileWriter

BATCH, LENGTH = 8, 2048
VOCABULARY = 32_000
BATCHES = 500
CORPORA, DOCUMENTS, DOCUMENT_TOKENS = 100, 10**9, 100


def write_tokens(prefix: Path, tokens: int) -> None:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, tokens, dtype=np.uint16)
    with TokenFileWriter(prefix, VOCABULARY) as writer:
        writer.append(ids, np.full(tokens // 1000, 1000, np.int32))


def batch_reader(dataset: Corpus | Blend) -> Callable[[], None]:
    batches = read_batches(dataset, 0, BATCH, BATCH, torch.device("cpu"))

    def run() -> None:
        for _ in range(BATCHES):
            next(batches)

    return run


def copier(content: np.ndarray[Any, Any], dtype: type) -> Callable[[], None]:
    """Copies as many tokens as the reader reads, in the order of the memory."""
    size = BATCH * (LENGTH + 1)
    source: np.ndarray[Any, Any] = (
        content[: len(content) // size * size].reshape(-1, size).astype(dtype, copy=False)
    )
    target = np.empty(size, np.int64)

    def run() -> None:
        for number in range(BATCHES):
            np.copyto(target, source[number % len(source)])

    return run


def reading(scratch: Path, rounds: int) -> list[str]:
    """The table of random batches against copies of memory."""
    tokens = 100_000_000
    write_tokens(scratch / "tokens", tokens)
    corpus = Corpus(scratch / "tokens", LENGTH, 0, vocabulary_size=VOCABULARY)
    content = np.fromfile(scratch / "tokens.bin", np.uint16)
    reader, wide, narrow = "batches in random order", "copy of int64", "copy of uint16 to int64"
    timings = interleave(
        {
            reader: batch_reader(corpus),
            wide: copier(content, np.int64),
            narrow: copier(content, np.uint16),
        },
        rounds,
    )
    millions = BATCHES * BATCH * (LENGTH + 1) / 1e6
    lines = [
        f"{BATCHES} batches of {BATCH} x {LENGTH + 1} tokens from a file of {tokens / 1e6:.0f} "
        "million in the page cache, one thread:",
        "",
        f"| | million tokens/s | time of {reader} against it |",
        "|---|---|---|",
    ]
    for name, own in timings.items():
        rate = spread([millions / timing.seconds for timing in own]).median
        lines.append(f"| {name} | {rate:.0f} | {ratio(timings[reader], own)} |")
    return [*lines, "", *opening(scratch)]


def write_sparse_corpus(prefix: Path) -> None:
    """Looks like DOCUMENTS documents of DOCUMENT_TOKENS tokens: the index has zeros but at the ends
    of its arrays, where it is read."""
    sizes = 34 + 4 * DOCUMENTS
    size = 2 * DOCUMENT_TOKENS
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, DOCUMENTS, DOCUMENTS + 1))
        for offset, form, value in (
            (sizes - 4, "<i", DOCUMENT_TOKENS),
            (sizes + 8 * (DOCUMENTS - 1), "<q", size * (DOCUMENTS - 1)),
            (sizes + 16 * DOCUMENTS, "<q", DOCUMENTS),
        ):
            stream.seek(offset)
            stream.write(struct.pack(form, value))
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(size * DOCUMENTS)


def opening(scratch: Path) -> list[str]:
    """Seconds and memory until the first batch of a blend of very large corpora."""
    folder = scratch / "sparse"
    folder.mkdir()
    for number in range(CORPORA):
        write_sparse_corpus(folder / f"{number:03}")
    command = [sys.executable, "-m", "benchmarks.data_reading", str(folder)]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(5)
    ]
    seconds, megabytes = (spread([float(run[column]) for run in runs]) for column in (0, 1))
    return [
        f"A blend of {CORPORA} corpora of {DOCUMENTS:,} documents each (sparse files, "
        f"{CORPORA * DOCUMENTS * DOCUMENT_TOKENS / 1e12:.0f} trillion tokens) gives its first "
        f"batch {seconds.median:.2f} s ({seconds.low:.2f} to {seconds.high:.2f}, {len(runs)} runs) "
        f"after its imports, and takes {megabytes.median:.0f} MB of memory.",
    ]


def open_blend(folder: Path) -> None:
    """Prints seconds and megabytes to the first batch."""

    def resident() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    before, start = resident(), time.perf_counter()
    open_corpus = functools.partial(
        Corpus, sequence_length=LENGTH, seed=0, vocabulary_size=VOCABULARY
    )
    corpora = [open_corpus(index.with_suffix("")) for index in sorted(folder.glob("*.idx"))]
    blend = Blend(corpora, [1.0] * len(corpora))
    next(read_batches(blend, 0, BATCH, BATCH, torch.device("cpu")))
    print(time.perf_counter() - start, resident() - before)


if __name__ == "__main__":
    open_blend(Path(sys.argv[1]))
