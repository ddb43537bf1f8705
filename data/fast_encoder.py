"""Encoding by the gigatoken package, where it gives the same ids as the tokenizer's own library.

gigatoken is young, and no specification binds it. So it works on probation: a tokenizer that it
does not support, or that it reads differently on any text of the check, is left to its own library,
and the user is told.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from data.tokenizer import Encoded, Tokenizer

Backend = Literal["checked", "trusted", "reference"]
"""The fast encoder if it passes the check; without one, as a check was passed before; or never."""

# The reference encodes 5 MB/s: a megabyte of the sample takes 0.2 s.
_SAMPLE_CHARACTERS = 1_000_000

_AWKWARD = [
    "a", "The", " the", "ing", "Hello", "don't", "I'LL", "\u00e9", "e\u0301", "\u0130\u0131",
    "\u00df", "\u4f60\u597d\u4e16\u754c", "\u3053\u3093\u306b\u3061\u306f",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05c1\u05b8", "\uac00\u1100\u1161", "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", " ",
    "  ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", "\0", "\x0b\x0c", "\x1c\x1f", "\x7f",
    "\x85", "\u00a0", "\u2003", "\u2028", "\u3000", "\u180e", "\u200b", "\ufeff", "\ufffd",
    "\U0010ffff", "1", "12", "123", "1234567", "\u0661\u0662", "\u00b2\u00bd", "\u2167", "3.14",
    "0x0A", "1e-5", "_", "__init__", "(self):", "->", "!=", "...", "///", "'", "''", "'s",
    "\u2019s", '"', "<", "|", ">", "@", "#", "$", "\\n", "\u2581", "\u2585", "\u0120", "\u010a",
    "camelCase", "ALLCAPS", "HTTPServer", "\u01c5", "\u02b0", "\U0001d400", "\uff21",
]  # fmt: skip


def stress_texts(tokens: Sequence[str]) -> Iterator[str]:
    """Texts on which tokenizers differ: joined at random from awkward parts, always the same.

    Args:
        tokens: texts of special and added tokens, to be among the parts.
    """
    choice = random.Random(0)
    yield ""
    yield from (part * 1001 for part in ("a", " ", "\n", "ab", "\u4f60", "1", "'", "\t "))
    tokens = tokens if len(tokens) <= 300 else choice.sample(tokens, 300)
    alphabet = _AWKWARD + [part for token in tokens for part in (token, token[1:], token + token)]
    for part in alphabet:
        yield part
        yield f"x{part}y {part} z"
    for _ in range(1500):
        yield "".join(choice.choices(alphabet, k=choice.randint(2, 24)))
    # Half of these code points mean nothing; what matters is that both sides agree.
    for limit in (0x80, 0x250, 0x3000, 0x110000):
        for _ in range(100):
            points = (choice.randrange(limit) for _ in range(40))
            yield "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


class FastEncoder:
    """`encode_batch` by gigatoken, on the calling thread."""

    def __init__(self, backend: Any, reference: Tokenizer, aside: Callable[[str], Any]) -> None:
        """
        Args:
            backend: a gigatoken.Tokenizer.
            reference: encodes the texts that gigatoken must not see.
            aside: whether a text is one of these.
        """
        self._encode = backend.encode
        self._reference = reference
        self._aside = aside

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        parts = [self._encode_one(text) for text in texts]
        lengths = np.fromiter(map(len, parts), np.int32, len(parts))
        return np.concatenate([np.empty(0, np.int32), *parts]), lengths

    def _encode_one(self, text: str) -> npt.NDArray[np.int32]:
        if self._aside(text):
            return self._reference.reference_encode_batch([text])[0]
        ids: npt.NDArray[np.int32] = self._encode(text).view(np.int32)
        return ids


def sentencepiece_encoder(
    tokenizer: Tokenizer, model: bytes, control_texts: Sequence[str]
) -> FastEncoder:
    """Of a BPE model with byte fallback; gigatoken refuses others.

    It would take the text of a control token for the token, and sentencepiece's symbol for a space.
    """
    import gigatoken

    backend = gigatoken.Tokenizer.from_sentencepiece(model)
    return FastEncoder(backend, tokenizer, _holds(["\u2581", *control_texts]))


def huggingface_encoder(tokenizer: Tokenizer, content: dict[str, Any]) -> FastEncoder:
    """Of the content of a tokenizer.json. Raises ValueError where gigatoken is known to differ."""
    import gigatoken

    added = [token for token in content.get("added_tokens") or [] if not token["special"]]
    strange = [
        token["content"]
        for token in added
        if token["single_word"] or token["lstrip"] or token["rstrip"]
    ]
    aside = _holds(strange)
    normalizer = content.get("normalizer")
    normalizers = _normalizers(normalizer)
    if normalizers == ["NFC"]:
        # gigatoken knows combining marks that `tokenizers` does not. Text that Python finds
        # normalized is left alone by both, as Python's tables are newer than those of `tokenizers`.
        normalizer, held = None, aside
        aside = lambda text: not unicodedata.is_normalized("NFC", text) or held(text)  # noqa: E731
    elif not set(normalizers) <= {"Prepend", "Replace"}:
        raise ValueError(f"unverified normalizers {normalizers}")
    # Special tokens are left out: what is not there cannot be found in a text.
    without = {**content, "added_tokens": added, "normalizer": normalizer, "post_processor": None}
    return FastEncoder(gigatoken.Tokenizer.from_json(json.dumps(without)), tokenizer, aside)


def _normalizers(normalizer: dict[str, Any] | None) -> list[str]:
    if normalizer is None:
        return []
    return [part["type"] for part in normalizer.get("normalizers", [normalizer])]


def _holds(texts: Sequence[str]) -> Callable[[str], Any]:
    if not texts:
        return lambda text: False
    return re.compile("|".join(map(re.escape, texts))).search


def checked_encoder(
    tokenizer: Tokenizer,
    build: Callable[[], FastEncoder],
    sample: Sequence[str],
    backend: Backend,
) -> tuple[FastEncoder | None, tuple[str, ...]]:
    """The fast encoder of a tokenizer, or None and the notice that tells why.

    Args:
        tokenizer: it and `reference_encode_batch` are ready for use.
        build: makes the encoder.
        sample: texts to check beside the built-in ones.
        backend: see `Backend`.
    """
    if backend == "reference":
        return None, ()
    encoder, reason = None, ""
    try:
        encoder = build()
    except ImportError:
        reason = "the gigatoken package is not installed"
    except BaseException as problem:
        reason = f"gigatoken does not support it: {_panic_or_error(problem)}"
    if encoder is not None and backend == "checked":
        reason = _difference(tokenizer, encoder, sample)
    if not reason:
        return encoder, ()
    return None, (f"{tokenizer.path}: encoding without the fast encoder: {reason}",)


def _panic_or_error(problem: BaseException) -> str:
    """A line on a problem of gigatoken; a panic of its Rust code is not an Exception."""
    if isinstance(problem, KeyboardInterrupt | SystemExit | MemoryError):
        raise problem
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def _difference(tokenizer: Tokenizer, encoder: FastEncoder, sample: Sequence[str]) -> str:
    """What the two encode differently, with the first such text; empty if nothing."""
    texts = [*stress_texts(tokenizer.added_texts), *_cut(sample)]
    expected, lengths = tokenizer.reference_encode_batch(texts)
    try:
        found, found_lengths = encoder.encode_batch(texts)
        if np.array_equal(lengths, found_lengths) and np.array_equal(expected, found):
            return ""
        text = next(text for text in texts if not _agree(tokenizer, encoder, text))
        lines = text.splitlines(keepends=True)
        shorter = next((line for line in lines if not _agree(tokenizer, encoder, line)), text)
        return f"gigatoken encodes {shorter[:80]!r} differently"
    except BaseException as problem:
        return f"gigatoken fails on the texts of the check: {_panic_or_error(problem)}"


def _agree(tokenizer: Tokenizer, encoder: FastEncoder, text: str) -> bool:
    pairs = zip(tokenizer.reference_encode_batch([text]), encoder.encode_batch([text]), strict=True)
    return all(np.array_equal(expected, found) for expected, found in pairs)


def _cut(sample: Sequence[str]) -> Iterator[str]:
    left = _SAMPLE_CHARACTERS
    for text in sample:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)
