"""Documents to tokens in parallel processes, in an order that does not depend on their number."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.tokenizer import Tokenizer, load_tokenizer

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class Encoded:
    """A chunk of documents as tokens."""

    tokens: dict[str, npt.NDArray[np.int32]]
    """By split: [tokens of its documents, one after another]."""
    lengths: dict[str, npt.NDArray[np.int32]]
    """By split: [documents]."""
    text_bytes: int


def encode_chunks(
    chunks: Iterable[list[str]], model: Path, validation_fraction: float, workers: int
) -> Iterator[Encoded]:
    """Yields the chunks of documents as tokens, in order, each document ended by its token.

    Args:
        chunks: lists of documents; two a worker are in memory.
        model: path of the tokenizer.
        validation_fraction: share of documents for the validation split.
        workers: processes; 1 works in this one.
    """
    encode = functools.partial(_encode, model, validation_fraction)
    if workers == 1:
        yield from map(encode, chunks)
        return
    # A fork would copy the threads' locks of whoever calls this, but not the threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        pending: deque[Future[Encoded]] = deque()
        for chunk in chunks:
            pending.append(pool.submit(encode, chunk))
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _encode(model: Path, validation_fraction: float, documents: list[str]) -> Encoded:
    tokenizer = _tokenizer(model)
    tokens: dict[str, list[int]] = {TRAIN: [], VALIDATION: []}
    lengths: dict[str, list[int]] = {TRAIN: [], VALIDATION: []}
    text_bytes = 0
    for document in documents:
        text = document.encode()
        text_bytes += len(text)
        split = VALIDATION if _held_out(text, validation_fraction) else TRAIN
        ids = tokenizer.encode(document)
        tokens[split] += ids
        tokens[split].append(tokenizer.end_of_document)
        lengths[split].append(len(ids) + 1)
    return Encoded(
        {split: np.array(ids, np.int32) for split, ids in tokens.items() if ids},
        {split: np.array(sizes, np.int32) for split, sizes in lengths.items() if sizes},
        text_bytes,
    )


@functools.cache
def _tokenizer(model: Path) -> Tokenizer:
    """Loaded once in each worker."""
    return load_tokenizer(model)


def _held_out(text: bytes, fraction: float) -> bool:
    """Whether a document belongs to validation: duplicates of it do as well."""
    digest = hashlib.blake2b(text, digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
