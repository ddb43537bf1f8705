"""Which token separates the documents of a run's corpora, and who made that token."""

from __future__ import annotations

from configs.reading import ConfigError
from configs.schema import DataConfig
from data.manifest import TokenizerRecord, read_manifest
from data.tokenizer import load_tokenizer

END_OF_DOCUMENT = "eos"
"""Its name among a tokenizer's special tokens."""


def separator_of(data: DataConfig) -> int | None:
    """The id of the token that ends every document; None where documents are not masked.

    Raises:
        ConfigError: a corpus does not say, or they do not agree.
        ValueError: a manifest or the tokenizer named is damaged.
    """
    if not data.document_masking:
        return None
    named = tokenizer_record(data.tokenizer)
    found: dict[str, int] = {}
    for path in [*(corpus.path for corpus in data.train), *data.validation_sets.values()]:
        manifest = read_manifest(path)
        tokenizer = manifest.inputs.tokenizer if manifest else named
        if tokenizer is None:
            raise _refused(f"{path} has no manifest.json that would name its tokenizer")
        found[path] = tokenizer.special_tokens.get(END_OF_DOCUMENT, -1)
        if found[path] < 0:
            raise _refused(f"the tokenizer of {path} has no end-of-document token")
    if len(set(found.values())) > 1:
        raise _refused(f"the corpora end documents with different tokens: {found}")
    return next(iter(found.values()))


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
