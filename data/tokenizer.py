"""Text to token ids and back, and the command that trains a tokenizer.

    python -m data.tokenizer train --source python-stdlib --vocab-size 8192 --output tokenizer.model

Two kinds are read: a sentencepiece model, and Hugging Face's tokenizer.json, alone or in the folder
of a transformers model. Both encode a text as text: no begin or end token is added, nothing is cut
off, and the text of a special token is never that token.

Where the gigatoken package supports a tokenizer, it does the encoding, at many times the speed,
once it has shown the same ids as the library that defines them (data/fast_encoder.py).
"""

from __future__ import annotations

import abc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data.manifest import MANIFEST_NAME, TokenizerRecord

if TYPE_CHECKING:
    from data.fast_encoder import Backend, FastEncoder

Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""([tokens] ids of all texts, one after another, [texts] tokens of each)."""

ROLES = ("unk", "bos", "eos", "pad")

NAME_THE_END = "name it with --end-of-document TOKEN (end_of_document= in Python)"

# What a tokenizer made for another purpose is likely to lose.
_PROBE = " two  spaces\t\r\n\n\0 \uff21 e\u0301 \U0001f600 \u2581 <s></s><unk><0x0A><|endoftext|> "


class Tokenizer(abc.ABC):
    """What both kinds have in common.

    It can be pickled: the copy encodes with the same backend, without another check of it.
    """

    path: Path
    """Where it was read, for messages."""
    files: dict[str, bytes]
    """What a corpus keeps of it, by file name: `load_tokenizer` reads a folder of them."""
    vocabulary_size: int
    """The largest id and one: added tokens count, and so do gaps."""
    end_of_document: int
    """The id that ends every document. No text encodes to it."""
    special_tokens: dict[str, int]
    """By role: eos, which ends documents, and those of bos, unk, pad that it has."""
    notices: tuple[str, ...] = ()
    """What the user should know of how it is used."""
    added_texts: Sequence[str] = ()
    """The texts of tokens that were added to the model's own."""
    fast: FastEncoder | None = None

    @abc.abstractmethod
    def __init__(
        self,
        path: Path,
        files: dict[str, bytes],
        end_of_document: str | int | None = None,
        *,
        sample: Sequence[str] = (),
        backend: Backend = "checked",
    ) -> None:
        """See `load_tokenizer`; `end_of_document` may be an id."""

    def __reduce__(self) -> Any:
        backend: Backend = "reference" if self.fast is None else "trusted"
        return _restored, (type(self), self.path, self.files, self.end_of_document, backend)

    @property
    @abc.abstractmethod
    def identity(self) -> TokenizerRecord:
        """What a corpus records of its tokenizer."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens have none."""

    @abc.abstractmethod
    def token_name(self, token: int) -> str | None:
        """The token as the vocabulary spells it; None if no token has this id."""

    @abc.abstractmethod
    def reference_encode_batch(self, texts: Sequence[str]) -> Encoded:
        """`encode_batch` by the library that defines this kind of tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of texts, without any begin or end token.

        Raises ValueError if a text holds half a surrogate pair, which no UTF-8 text does.
        """
        try:
            if self.fast is not None:
                return self.fast.encode_batch(texts)
            return self.reference_encode_batch(texts)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                _require_unicode(text)
            raise

    def encode(self, text: str) -> list[int]:
        """The ids of one text; the text `</s>` is four characters, never the token."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    @property
    def lossless(self) -> bool:
        """Whether a text of the kind that tokenizers tend to alter comes back to the byte."""
        probe = _PROBE + "".join(self.added_texts)
        return self.decode(self.encode(probe)) == probe


def _restored(
    kind: type[Tokenizer],
    path: Path,
    files: dict[str, bytes],
    end_of_document: int,
    backend: Backend,
) -> Tokenizer:
    return kind(path, files, end_of_document, backend=backend)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise ValueError(
            f"the lone surrogate {text[problem.start]!r} at character {problem.start} is not valid "
            "Unicode text"
        ) from None


def load_tokenizer(
    path: str | Path,
    *,
    end_of_document: str | None = None,
    sample: Sequence[str] = (),
    fast: bool = True,
) -> Tokenizer:
    """Reads a tokenizer; the libraries it needs are imported here.

    Args:
        path: a sentencepiece .model, a tokenizer.json, or a folder that holds one of them: a
            transformers model's or a prepared corpus'.
        end_of_document: the token that ends documents, by its text, where the files name none or
            another.
        sample: texts of the kind to be encoded, on which the fast encoder must agree as well.
        fast: whether to look for a fast encoder; for a few texts its check is not worth the time.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or does not tell which token ends documents.
    """
    path = Path(path)
    backend: Backend = "checked" if fast else "reference"
    end: str | int | None = end_of_document
    if path.is_dir():
        if end is None:
            end = _recorded_end(path / MANIFEST_NAME)
        path = _tokenizer_file(path)
    if path.suffix == ".json":
        from data.huggingface_tokenizer import HuggingFaceTokenizer, read_files

        files = read_files(path)
        return HuggingFaceTokenizer(path, files, end, sample=sample, backend=backend)
    from data.sentencepiece_tokenizer import SentencePieceTokenizer

    files = {"tokenizer.model": path.read_bytes()}
    return SentencePieceTokenizer(path, files, end, sample=sample, backend=backend)


def _tokenizer_file(folder: Path) -> Path:
    # Of a folder with both, transformers uses tokenizer.json.
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).exists():
            return folder / name
    raise ValueError(
        f"{folder} holds neither a tokenizer.json nor a tokenizer.model: expected a prepared "
        "corpus, or a transformers model with its fast tokenizer (save_pretrained writes it)"
    )


def _recorded_end(manifest: Path) -> int | None:
    """The token that ended the documents of a prepared corpus."""
    try:
        record: Any = json.loads(manifest.read_bytes())
        return int(record["inputs"]["tokenizer"]["special_tokens"]["eos"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None  # another tool's folder


def write_atomically(path: Path, content: bytes) -> None:
    """A reader of `path` finds all of the content or none, even after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    from data.train_tokenizer import main

    sys.exit(main())
