"""Tokenizer files that transformers loads, of the ids that a corpus was prepared with.

A sentencepiece model becomes a tokenizer.json; a tokenizer.json stays as it is. What was written is
loaded again and has to give the same ids. Two kinds of text are exempt, as transformers reads them
otherwise by design: the texts of special tokens, and sentencepiece's own symbol for a space.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.fast_encoder import stress_texts
from data.sentencepiece_tokenizer import SPACE_SYMBOL, SentencePieceTokenizer
from data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

CONFIG = "tokenizer_config.json"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of pieces in sentencepiece_model.proto."""
UNIGRAM, BPE = 1, 2


def write_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write the files beside a model's and load them again.

    Args:
        longest: tokens that the model takes.

    Raises:
        ValueError: what transformers makes of them gives other ids.
    """
    from transformers import AutoTokenizer

    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    if isinstance(tokenizer, SentencePieceTokenizer):
        from_sentencepiece(tokenizer).save(str(folder / "tokenizer.json"))
    roles = {
        f"{role}_token": tokenizer.token_name(token)
        for role, token in tokenizer.special_tokens.items()
    }
    settings = {
        **json.loads(tokenizer.files.get(CONFIG, b"{}")),
        **roles,
        # Other classes build a tokenizer of their own from its parts.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if text := differing_text(tokenizer, loaded):
        raise ValueError(
            f"{tokenizer.path}: has no exact form in transformers, which encodes {text!r} "
            "differently; leave the tokenizer out with --tokenizer none"
        )


def from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """The same pieces in the model of the same kind.

    Raises:
        ValueError: there is no such kind in `tokenizers`.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    (content,) = tokenizer.files.values()
    description: Any = sentencepiece_model_pb2  # its names are made when it is imported
    proto = description.ModelProto.FromString(content)
    trainer, spec, pieces = proto.trainer_spec, proto.normalizer_spec, list(proto.pieces)
    model: Any
    if trainer.model_type == UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in pieces]
        model = models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    elif trainer.model_type == BPE:
        ids = {piece.piece: number for number, piece in enumerate(pieces)}
        made = {p.piece: n for n, p in enumerate(pieces) if p.type not in (UNKNOWN, CONTROL, BYTE)}
        model = models.BPE(
            ids,
            _merges(made),
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    else:
        raise ValueError(f"{tokenizer.path}: its model type has no form in transformers")
    fast = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", SPACE_SYMBOL)]
    strip: list[Any] = []
    if spec.remove_extra_whitespaces:
        steps.insert(0, normalizers.Replace(Regex(" {2,}"), " "))
        steps.insert(0, normalizers.Replace(Regex("^ +| +$"), ""))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE_SYMBOL))
        strip = [decoders.Strip(" ", 1, 0)]
    if spec.precompiled_charsmap:
        steps.insert(0, normalizers.Precompiled(spec.precompiled_charsmap))
    fast.normalizer = normalizers.Sequence(steps)
    fast.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    fast.add_tokens(
        [
            AddedToken(piece.piece, special=piece.type == CONTROL, normalized=False)
            for piece in pieces
            if piece.type in (CONTROL, USER_DEFINED)
        ]
    )
    return fast


def _merges(pieces: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, in the order in which sentencepiece learnt the pieces."""
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def differing_text(tokenizer: Tokenizer, theirs: Any) -> str | None:
    """The first text for which a transformers tokenizer has other ids; None if there is none."""
    special = [tokenizer.token_name(token) for token in tokenizer.special_tokens.values()]
    exempt = [text for text in (*special, *tokenizer.added_texts, SPACE_SYMBOL) if text]
    for text in stress_texts(()):
        if any(part in text for part in exempt):
            continue
        ids = theirs(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids != tokenizer.encode(text):
            return text[:80]
    return None
