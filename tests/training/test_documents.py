"""Which token separates documents, and what is refused where the corpora do not say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.reading import ConfigError
from configs.schema import DataConfig
from data.manifest import MANIFEST_NAME
from data.train_tokenizer import train_tokenizer
from tests.conftest import SEPARATOR
from training.documents import separator_of


def masked(*folders: Path) -> DataConfig:
    """Training on one corpus of each folder, and validating on the last's."""
    return DataConfig.model_validate(
        {
            "train": [{"path": str(folder / "train")} for folder in folders],
            "validation": str(folders[-1] / "validation"),
            "document_masking": True,
        }
    )


@pytest.fixture
def manifest_with(corpus_of_documents: Path, tmp_path: Path) -> Callable[[dict[str, int]], Path]:
    """A folder whose manifest has these special tokens."""

    def write(tokens: dict[str, int]) -> Path:
        manifest = json.loads((corpus_of_documents / MANIFEST_NAME).read_text())
        manifest["inputs"]["tokenizer"]["special_tokens"] = tokens
        (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest))
        return tmp_path

    return write


def test_the_manifest_names_the_separator(corpus_of_documents: Path, corpus: Path) -> None:
    assert separator_of(masked(corpus_of_documents)) == SEPARATOR
    off = masked(corpus).model_copy(update={"document_masking": False})
    assert separator_of(off) is None


def test_a_tokenizer_that_ends_no_documents_is_refused(
    manifest_with: Callable[[dict[str, int]], Path],
) -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.document_masking: the tokenizer of .*/train has"
    ):
        separator_of(masked(manifest_with({"bos": 1})))


def test_corpora_that_do_not_agree_are_refused(
    corpus_of_documents: Path, manifest_with: Callable[[dict[str, int]], Path]
) -> None:
    with pytest.raises(ConfigError, match="end documents with different tokens"):
        separator_of(masked(corpus_of_documents, manifest_with({"eos": SEPARATOR + 1})))


def test_a_corpus_without_a_manifest_needs_its_tokenizer_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        separator_of(masked(tmp_path))
    (line,) = caught.value.problems
    assert line.startswith(f"data.document_masking: {tmp_path}/train has no manifest.json")
    trained = tmp_path / "tokenizer.model"
    train_tokenizer(["some text to learn from, " * 20], 300, trained)
    named = masked(tmp_path).model_copy(update={"tokenizer": str(trained)})
    assert separator_of(named) == 2  # what data.tokenizer gives </s>
