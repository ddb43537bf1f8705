"""Corpora that Megatron-LM, Megatron-DeepSpeed or GPT-NeoX prepared: they have no manifest.

Nothing in them says which tokenizer their ids are of: it has to be named, and is checked as far as
that can be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.manifest import TokenizerRecord
from data.token_file import TokenArray, TokenFile

_CHECKED_BLOCKS = 16
_CHECKED_TOKENS = 4096  # of each block


@dataclass(frozen=True)
class DerivedManifest:
    """What a manifest says of a corpus, as far as its files tell; there is no checksum."""

    documents: int
    sequences: int
    """More than documents where these were cut into sentences."""
    tokens: int
    dtype: str
    bin_bytes: int
    idx_bytes: int
    tokenizer: TokenizerRecord


def derive_manifest(file: TokenFile, tokenizer: TokenizerRecord) -> DerivedManifest:
    """Raises ValueError if the ids looked at are not the tokenizer's: see `sampled_ids`."""
    lowest, highest = sampled_ids(file)
    if lowest < 0 or highest >= tokenizer.vocabulary_size:
        raise ValueError(
            f"{file.bin_path}: holds ids from {lowest} to {highest}, but data.tokenizer has "
            f"{tokenizer.vocabulary_size:,}: made with another tokenizer"
        )
    return DerivedManifest(
        documents=file.document_count,
        sequences=file.sequence_count,
        tokens=file.token_count,
        dtype=file.dtype.name,
        bin_bytes=file.bin_path.stat().st_size,
        idx_bytes=file.bin_path.with_suffix(".idx").stat().st_size,
        tokenizer=tokenizer,
    )


def sampled_ids(file: TokenFile) -> tuple[int, int]:
    """The lowest and highest id of both ends and some blocks between, evenly spaced."""
    count = min(_CHECKED_TOKENS, file.token_count)
    starts = np.linspace(0, file.token_count - count, _CHECKED_BLOCKS).astype(np.int64)
    tokens: TokenArray = file.rows(np.unique(starts), count)
    return int(tokens.min()), int(tokens.max())


def require_one_tokenizer(
    files: Sequence[TokenFile], named: TokenizerRecord | None, name: str | Path | None
) -> dict[str, DerivedManifest]:
    """Sees to it that all corpora are of one tokenizer, `named` where that is given (from `name`).

    Returns the manifests derived for files that have none, by path.

    Raises:
        ValueError: tokenizers differ, or a file without a manifest finds none named.
    """
    made_with = {
        str(file.bin_path): file.manifest.inputs.tokenizer.sha256
        for file in files
        if file.manifest is not None
    }
    if len(set(made_with.values())) > 1:
        listed = ", ".join(f"{path} ({sha256[:12]})" for path, sha256 in made_with.items())
        raise ValueError(f"the corpora were made with different tokenizers: {listed}")
    foreign = [file for file in files if file.manifest is None]
    if named is None:
        if foreign:
            raise ValueError(
                f"{foreign[0].bin_path}: no manifest.json lists it, so that its tokenizer is "
                "unknown: name it in data.tokenizer"
            )
        return {}
    for path, sha256 in made_with.items():
        if sha256 != named.sha256:
            raise ValueError(
                f"data.tokenizer: {name} ({named.sha256[:12]}) is not the tokenizer that {path} "
                f"was made with ({sha256[:12]})"
            )
    return {str(file.bin_path): derive_manifest(file, named) for file in foreign}
