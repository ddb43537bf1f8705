"""Hugging Face tokenizers: tokenizer.json, read by the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from data.fast_encoder import Backend, checked_encoder, huggingface_encoder
from data.manifest import TokenizerRecord
from data.tokenizer import NAME_THE_END, ROLES, Encoded, Tokenizer

_CONFIG_NAMES = ("tokenizer_config.json", "special_tokens_map.json")

# What ends documents, by the names that published tokenizers use.
_WELL_KNOWN_ENDS = (
    "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<EOS>", "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip


def read_files(path: Path) -> dict[str, bytes]:
    """A tokenizer.json, and what lies beside it to name its special tokens."""
    files = {"tokenizer.json": path.read_bytes()}
    for name in _CONFIG_NAMES:
        if (beside := path.with_name(name)).exists():
            files[name] = beside.read_bytes()
    return files


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of any model type.

    Raises:
        ValueError: a file is damaged, or none of them tells which token ends documents.
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
        self.path, self.files = path, files
        content = _parsed(path, files["tokenizer.json"])
        notices = _switch_off(path, content)
        vocabulary = _vocabulary(path, content)
        self.vocabulary_size = max(vocabulary.values()) + 1
        roles = _named_roles(path, files)
        roles["eos"] = _end_of_document(path, vocabulary, end_of_document, roles.get("eos"))
        self.special_tokens = {
            role: vocabulary[roles[role]] for role in ROLES if roles.get(role) in vocabulary
        }
        self.end_of_document = self.special_tokens["eos"]
        _make_special(content, roles["eos"], self.end_of_document)
        self.added_texts = [token["content"] for token in content["added_tokens"]]
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as problem:  # the library raises no other type
            raise ValueError(f"{path}: not a tokenizer.json of Hugging Face: {problem}") from None
        self._tokenizer.encode_special_tokens = True
        self._reachable = self._pieces_like_special_tokens(content)
        self.fast, refusal = checked_encoder(
            self, lambda: huggingface_encoder(self, content), sample, backend
        )
        self.notices = (*notices, *refusal)

    def _pieces_like_special_tokens(self, content: dict[str, Any]) -> re.Pattern[str] | None:
        """Finds texts that the model itself would make special tokens, by their first character.

        Unigram models have their special tokens among their pieces.
        """
        special = {
            token["content"]: token["id"] for token in content["added_tokens"] if token["special"]
        }
        reachable = [
            text
            for text, token in special.items()
            if len(text) > 1 and token in self._tokenizer.encode(text, add_special_tokens=False).ids
        ]
        pattern = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in reachable)
        return re.compile(pattern) if reachable else None

    @property
    def identity(self) -> TokenizerRecord:
        return TokenizerRecord(
            kind="huggingface",
            sha256=hashlib.sha256(self.files["tokenizer.json"]).hexdigest(),
            vocabulary_size=self.vocabulary_size,
            special_tokens=self.special_tokens,
        )

    def reference_encode_batch(self, texts: Sequence[str]) -> Encoded:
        tokens = [np.empty(0, np.int32)]
        lengths = []
        for text in texts:
            pieces = [self._encode_part(part) for part in self._parts(text)]
            tokens += pieces
            lengths.append(sum(map(len, pieces)))
        return np.concatenate(tokens), np.array(lengths, np.int32)

    def _parts(self, text: str) -> list[str]:
        """The text, cut within the texts of special tokens that the model would find whole."""
        if self._reachable is None:
            return [text]
        ends = [found.end() for found in self._reachable.finditer(text)]
        return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]

    def _encode_part(self, text: str) -> npt.NDArray[np.int32]:
        # The method for batches computes no offsets, which saves a fifth of the time. One text at
        # a time keeps it on one thread, and its hundred bytes a token alive for one text only.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def token_name(self, token: int) -> str | None:
        name: str | None = self._tokenizer.id_to_token(token)
        return name


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError as problem:
        raise ValueError(f"{path}: broken JSON: {problem}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed


def _switch_off(path: Path, content: dict[str, Any]) -> list[str]:
    """Takes out what would cut, fill or vary the ids of a document, and tells so."""
    found = [name for name in ("truncation", "padding") if content.get(name) is not None]
    for name in found:
        content[name] = None
    model = content.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        model["dropout"] = None
        found.append("dropout")
    return [f"{path}: its {name} is switched off: documents are kept whole" for name in found]


def _vocabulary(path: Path, content: dict[str, Any]) -> dict[str, int]:
    """Token ids by text, of the model and of added tokens."""
    try:
        pieces = content["model"]["vocab"]
        if isinstance(pieces, list):  # unigram: [text, score] in the order of ids
            pieces = {piece[0]: number for number, piece in enumerate(pieces)}
        content["added_tokens"] = content.get("added_tokens") or []
        added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        vocabulary: dict[str, int] = {**pieces, **added}
        if not vocabulary or min(vocabulary.values()) < 0:
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError(
            f"{path}: not a tokenizer.json of Hugging Face: it has no vocabulary in model.vocab"
        ) from None
    return vocabulary


def _named_roles(path: Path, files: dict[str, bytes]) -> dict[str, str]:
    """Texts of special tokens by role; tokenizer_config.json has the first word."""
    roles: dict[str, str] = {}
    for name in reversed(_CONFIG_NAMES):
        config = _parsed(path.with_name(name), files[name]) if name in files else {}
        for role in ROLES:
            token = config.get(f"{role}_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                roles[role] = text
    return roles


def _end_of_document(
    path: Path, vocabulary: dict[str, int], given: str | int | None, configured: str | None
) -> str:
    if isinstance(given, int):
        given = next((text for text, token in vocabulary.items() if token == given), str(given))
    for text, origin in ((given, "the end of document"), (configured, "its eos_token")):
        if text is not None:
            if text not in vocabulary:
                raise ValueError(
                    f"{path}: {origin} {text!r} is not in the vocabulary; {NAME_THE_END}"
                )
            return text
    known = [text for text in _WELL_KNOWN_ENDS if text in vocabulary]
    if len(known) == 1:
        return known[0]
    found = (
        f"several of the usual names ({', '.join(known)})" if known else "none of the usual names"
    )
    raise ValueError(
        f"{path}: nothing tells which token ends documents: there is no eos_token in a "
        f"tokenizer_config.json beside it, and {found} in its vocabulary; {NAME_THE_END}"
    )


def _make_special(content: dict[str, Any], text: str, token: int) -> None:
    """Also where the file has it for an ordinary token, no text may become it."""
    for added in content["added_tokens"]:
        if added["content"] == text:
            added["special"] = True
            return
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append({"id": token, "content": text, **flags, "special": True})
