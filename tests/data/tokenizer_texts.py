"""Texts and tokenizers that the tests of tokenizers share."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

AWKWARD = [
    "", " ", "  a", "a  ", "\n\n    return", "\t\tx\r\n\r", "\0a\0", "\u2581",
    " \u2581\u2581 a\u2581b", "<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "a</s>b", "\ufeffx",
    "\u2585 \u2047", "\u3000\uff21", "e\u0301\u00e9", "\U0001f600\u200d", "\ufffd",
    "\u2028\x85", "\U0010ffff", "<|endoftext|>", "a<|endoftext|>b", "\u0105\u0323 \u212b",
]  # fmt: skip

TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(st.sampled_from(" \t\r\n\0\u2581\u2585<>/s0xA'1\u0301")).map("def  f".join)
    | st.lists(st.sampled_from(AWKWARD)).map("".join)
)

# The words of Llama 3.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def stdlib_texts(step: int = 40) -> list[str]:
    """A sample of the standard library's files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::step]
    return [file.read_bytes().decode() for file in files]


def byte_level(
    texts: list[str], pre_tokenizer: PreTokenizer | None = None, size: int = 300
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def gpt2(texts: list[str]) -> Tokenizer:
    return byte_level(texts)


def llama3(texts: list[str]) -> Tokenizer:
    words = Split(Regex(_WORDS), "isolated")
    tokenizer = byte_level(texts, Sequence([words, ByteLevel(False, use_regex=False)]))
    tokenizer.model.ignore_merges = True
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def neox(texts: list[str]) -> Tokenizer:
    tokenizer = byte_level(texts)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)])
    return tokenizer


def flagged(texts: list[str]) -> Tokenizer:
    tokenizer = byte_level(texts)
    tokenizer.add_tokens(
        [
            "<think>",
            AddedToken("return", single_word=True),
            AddedToken("def", lstrip=True),
            AddedToken("0x", rstrip=True),
        ]
    )
    return tokenizer


KINDS: dict[str, Callable[[list[str]], Tokenizer]] = {
    kind.__name__: kind for kind in (gpt2, llama3, neox, flagged)
}


def rewritten(path: Path, target: Path, **changes: Any) -> Path:
    """A copy of a tokenizer.json with other values at its top level."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return target
