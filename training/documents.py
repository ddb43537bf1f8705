"""Which token separates the documents of a run's corpora, and who made that token."""

from __future__ import annotations

from configs.schema import ConfigError, DataConfig
from data.manifest import TokenizerRecord, read_manifest
from data.tokenizer import load_tokenizer

END_OF_DOCUMENT = "eos"
"""Its name among a tokenizer's special tokens."""


def separator_of(data: DataConfig) -> int | None:
    """The id of the token that ends every document; None where documents are not masked.

    Raises:
        ConfigError: the tokenizer is unknown, or has no such token.
        ValueError: a manifest or the tokenizer named is damaged.
    """
    if not data.document_masking:
        return None
    path = data.train[0].path  # open_data sees to it that all corpora are of one tokenizer
    manifest = read_manifest(path)
    tokenizer = manifest.inputs.tokenizer if manifest else tokenizer_record(data.tokenizer)
    if tokenizer is None:
        raise _refused(f"{path} has no manifest.json that would name its tokenizer")
    separator = tokenizer.special_tokens.get(END_OF_DOCUMENT, -1)
    if separator < 0:
        raise _refused(f"the tokenizer of {path} has no end-of-document token")
    return separator


def tokenizer_record(path: str | None) -> TokenizerRecord | None:
    """Of the tokenizer that data.tokenizer names. Raises ValueError if there is none."""
    if path is None:
        return None
    try:
        return TokenizerRecord.model_validate(load_tokenizer(path, fast=False).identity)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.tokenizer: {error}") from None


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        [
            f"data.document_masking: {reason}; set it to false, name the tokenizer in "
            "data.tokenizer, or use python -m data.prepare"
        ]
    )
