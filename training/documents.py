"""Which token separates the documents of a run's corpora."""

from __future__ import annotations

from configs.schema import ConfigError, DataConfig
from data.manifest import read_manifest

END_OF_DOCUMENT = "eos"
"""Its name among a manifest's special tokens."""


def separator_of(data: DataConfig) -> int | None:
    """The id of the token that ends every document; None where documents are not masked.

    Raises:
        ConfigError: a corpus does not say, or they do not agree.
        ValueError: a manifest is damaged.
    """
    if not data.document_masking:
        return None
    found: dict[str, int] = {}
    for path in [*(corpus.path for corpus in data.train), data.validation]:
        manifest = read_manifest(path)
        if manifest is None:
            raise _refused(f"{path} has no manifest.json that would name its tokenizer")
        tokens = manifest.inputs.tokenizer.special_tokens
        if tokens.get(END_OF_DOCUMENT, -1) < 0:
            raise _refused(f"the tokenizer of {path} has no end-of-document token")
        found[path] = tokens[END_OF_DOCUMENT]
    if len(set(found.values())) > 1:
        raise _refused(f"the corpora end documents with different tokens: {found}")
    return next(iter(found.values()))


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        [f"data.document_masking: {reason}; set it to false, or use python -m data.prepare"]
    )
