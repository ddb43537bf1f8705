"""sentencepiece models."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data.fast_encoder import Backend, checked_encoder, sentencepiece_encoder
from data.manifest import TokenizerRecord
from data.tokenizer import NAME_THE_END, ROLES, Encoded, Tokenizer

# sentencepiece writes a space as this character inside its pieces, so that it cannot tell the two
# apart in a text.
SPACE_SYMBOL = "\u2581"


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model of any type.

    Raises:
        ValueError: the file is not a sentencepiece model, or no token can end documents.
    """

    def __init__(
        self,
        path: Path,
        files: dict[str, bytes],
        end_of_document: str | int | None = None,
        *,
        sample: Sequence[str] = (),
        backend: Backend = "checked",
    ) -> None:
        (model,) = files.values()
        try:
            if not model:
                raise RuntimeError("empty")  # the library would wait for another
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ValueError(f"{path}: not a sentencepiece model") from None
        self.path, self.files = path, files
        self.vocabulary_size = self._model.vocab_size()
        self.end_of_document = self._end(end_of_document)
        # A special token that a model lacks has the id -1.
        roles = {name: getattr(self._model, f"{name}_id")() for name in ROLES}
        roles["eos"] = self.end_of_document
        self.special_tokens = {name: token for name, token in roles.items() if token >= 0}
        symbol = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]
        self._space_symbol = (
            np.array(symbol, np.int32) if all(map(self._model.is_byte, symbol)) else None
        )
        self.fast, self.notices = checked_encoder(
            self, lambda: sentencepiece_encoder(self, model, self._control_texts()), sample, backend
        )

    def _control_texts(self) -> list[str]:
        return [
            self._model.id_to_piece(token)
            for token in range(self.vocabulary_size)
            if self._model.is_control(token)
        ]

    def _end(self, named: str | int | None) -> int:
        token = self._model.piece_to_id(named) if isinstance(named, str) else named
        if token is None:
            token = self._model.eos_id()
            if token < 0:
                raise ValueError(
                    f"{self.path}: this tokenizer has no end-of-sentence token to end documents "
                    f"with; if another of its control tokens does, {NAME_THE_END}"
                )
        if not self._model.is_control(token):
            raise ValueError(
                f"{self.path}: {named!r} cannot end documents: it is not a control token of this "
                "sentencepiece model, so text may hold it"
            )
        return token

    @property
    def identity(self) -> TokenizerRecord:
        (model,) = self.files.values()
        return TokenizerRecord(
            kind="sentencepiece",
            sha256=hashlib.sha256(model).hexdigest(),
            vocabulary_size=self.vocabulary_size,
            special_tokens=self.special_tokens,
        )

    def reference_encode_batch(self, texts: Sequence[str]) -> Encoded:
        parts: list[str] = []
        counts = []
        for text in texts:
            cut = [text] if self._space_symbol is None else text.split(SPACE_SYMBOL)
            parts += cut
            counts.append(len(cut))
        encoded = iter(self._model.encode(parts, return_type="numpy", num_threads=1))
        pieces: list[Any] = []
        lengths = np.empty(len(texts), np.int32)
        for number, count in enumerate(counts):
            first = len(pieces)
            for part in range(count):
                if part:
                    pieces.append(self._space_symbol)
                pieces.append(next(encoded))
            lengths[number] = sum(map(len, pieces[first:]))
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
        return tokens.astype(np.int32, copy=False), lengths

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode(list(ids))
        return text

    def token_name(self, token: int) -> str | None:
        if token >= self.vocabulary_size:
            return None
        name: str = self._model.id_to_piece(token)
        return name
