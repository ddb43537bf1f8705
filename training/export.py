"""A checkpoint as a folder that transformers loads: weights, configuration, tokenizer, card."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import RunConfig
from data.tokenizer import Tokenizer, load_tokenizer
from data.transformers_tokenizer import write_tokenizer
from model.config import ModelConfig
from model.gpt import GPT
from model.huggingface import architecture_of, export_tensor, to_transformers_config
from training import store
from training.checkpoint import find_checkpoint
from training.folders import new_folder, require_free
from training.logits import compare_logits, tokens_to_compare
from training.model_card import model_card
from training.shards import Item, write_shards
from training.weights import Read, open_weights

NO_TOKENIZER = "none"


def export(checkpoint: str, output: Path, dtype: str | None, tokenizer: str | None) -> str:
    """Returns what was written, in a line.

    Memory: a shard of the files and the weight that is added to it; then, for the comparison, the
    model of transformers in float32, and of ours the embeddings and a block.

    Args:
        checkpoint: a run folder, RUN for its newest checkpoint or RUN@STEP.
        dtype: of the weights; left out, what the run computes in.
        tokenizer: its path; left out, the run's; "none" leaves it out.

    Raises:
        ValueError, OSError: something is not there, not whole, or has no form in transformers.
        LogitsDiffer: transformers computes something else; nothing is left of the folder.
    """
    run_folder, step = run_and_step(checkpoint)
    require_free(output)
    found, manifest, config = find_checkpoint(run_folder, step)
    hf_config = to_transformers_config(config.model)
    class_name = architecture_of(config.model).class_name
    encoder = None if tokenizer == NO_TOKENIZER else _tokenizer(config, tokenizer)
    kind = getattr(torch, dtype or manifest.precision)
    with store.reading(found), new_folder(output) as folder:
        read = partial(_rounded, open_weights(found, manifest, config.model), kind)
        write_weights(folder, config.model, read, kind)
        ids = _special_ids(encoder)
        hf_config.update({"dtype": kind, **ids})
        hf_config.save_pretrained(folder)
        _save_generation_config(folder, ids)
        if encoder:
            write_tokenizer(encoder, folder, config.model.max_sequence_length)
        difference = compare_logits(folder, config.model, read, tokens_to_compare(config))
        card = model_card(output.name, class_name, run_folder, config, manifest, difference)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return (
        f"{output}: {class_name} in {kind}, step {manifest.progress['step']:,}; "
        f"logits in transformers differ by {difference:.1e} of the largest"
    )


def run_and_step(checkpoint: str) -> tuple[Path, int | None]:
    """RUN or RUN@STEP; a folder may have an @ in its name."""
    match = re.fullmatch(r"(.+)@(\d+)", checkpoint)
    if match is None or Path(checkpoint).exists():
        return Path(checkpoint), None
    return Path(match[1]), int(match[2])


def write_weights(folder: Path, config: ModelConfig, read: Read, dtype: torch.dtype) -> None:
    """Of all parameters, under transformers' names; a tied matrix once."""
    head = architecture_of(config).head_in_files

    def make(name: str) -> dict[str, Tensor]:
        parts = export_tensor(config, name, read(name))
        # Copies: parts of one tensor would each be written with all of its memory.
        return {
            theirs.replace("lm_head", head): part.clone(memory_format=torch.contiguous_format)
            for theirs, part in parts.items()
        }

    with torch.device("meta"):
        parameters = list(GPT(config).named_parameters())
    write_shards(
        folder, [Item(p.numel() * dtype.itemsize, partial(make, name)) for name, p in parameters]
    )


def _rounded(read: Read, dtype: torch.dtype, name: str) -> Tensor:
    return read(name).to(dtype)


def _tokenizer(config: RunConfig, path: str | None) -> Tokenizer:
    """
    Raises:
        ValueError: there is none, or its ids are not the model's.
    """
    path = path or config.data.tokenizer_path
    try:
        tokenizer = load_tokenizer(path, fast=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: no tokenizer: {error}; name it with --tokenizer, or leave it out with "
            f"--tokenizer {NO_TOKENIZER}"
        ) from None
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise ValueError(
            f"{path}: has {tokenizer.vocabulary_size:,} ids, but the model's vocabulary is "
            f"{config.model.vocabulary_size:,}: the tokenizer of another model"
        )
    return tokenizer


def _special_ids(tokenizer: Tokenizer | None) -> dict[str, int]:
    if tokenizer is None:
        return {}
    wanted = ("bos", "eos", "pad")
    return {f"{r}_token_id": i for r, i in tokenizer.special_tokens.items() if r in wanted}


def _save_generation_config(folder: Path, ids: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    GenerationConfig(**ids).save_pretrained(folder)
