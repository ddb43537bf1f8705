"""A folder of transformers' GPT-2, GPT-NeoX or Llama as a run folder that stands at step 0.

RUN/config.json and RUN/initial: the weights under our names, in the precision of the source, and
the source's tokenizer. `train.py` starts there from these weights rather than at random.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.reading import read_json
from configs.schema import RunConfig
from data.manifest import read_manifest
from data.tokenizer import load_tokenizer
from model.architectures import ARCHITECTURES, Architecture
from model.config import ModelConfig
from model.gpt import GPT
from model.huggingface import from_transformers_config, import_tensor, require_shapes
from training import store
from training.folders import new_folder, require_free
from training.logits import compare_logits, tokens_to_compare
from training.shards import Item, Shards, write_shards

FREE = {"preset", "dropout", "init_std", "vocabulary_multiple"}
"""What does not change the function of given weights."""
DERIVED = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Buffers in files of older versions: masks and frequencies, which the configuration implies."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip
CORPUS_KEEPS = {"sentencepiece": "tokenizer.model", "huggingface": "tokenizer.json"}


def import_model(source: Path, config: RunConfig) -> str:
    """Returns what was written, in a line.

    Memory: a shard of the files and the weight that is added to it; then, for the comparison, the
    model of transformers in float32, and of ours the embeddings and a block.

    Raises:
        ValueError, OSError: the source cannot be imported, or is not what the config says.
        LogitsDiffer: transformers computes something else; nothing is left of the run folder.
    """
    run_folder = Path(config.training.run_folder)
    require_free(run_folder)
    architecture, hf_config = read_config(source)
    require_same_model(config.model, from_transformers_config(hf_config), source)
    shards = Shards(source)
    stored = _stored_names(architecture, list(shards.shapes()))
    shapes = {theirs: shards.shapes()[name] for theirs, name in stored.items()}
    try:
        require_shapes(config.model, shapes)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    require_same_tokenizer(source, config)

    def make(name: str) -> dict[str, Tensor]:
        return {name: import_tensor(config.model, name, lambda t: shards.read(stored[t]))}

    with torch.device("meta"):
        parameters = list(GPT(config.model).named_parameters())
    items = [Item(p.numel() * p.itemsize, partial(make, name)) for name, p in parameters]
    with new_folder(run_folder) as folder:
        initial = folder / store.INITIAL
        initial.mkdir()
        write_shards(initial, items)
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, initial / name)
        store.write_durably(folder / "config.json", config.model_dump_json(indent=2) + "\n")
        read = Shards(initial).read
        difference = compare_logits(source, config.model, read, tokens_to_compare(config))
    return (
        f"{run_folder}: stands at step 0 with the weights of {source} ({architecture.class_name}); "
        f"logits in transformers differ by {difference:.1e} of the largest"
    )


def read_config(source: Path) -> tuple[Architecture, Any]:
    """
    Raises:
        ValueError: there is none, or it is of another class.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = source / "config.json"
    raw = read_json(path)
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    architecture = by_type.get(raw.get("model_type", ""))
    if architecture is None:
        kind = raw.get("model_type")
        raise ValueError(f"{path}: model_type is {kind!r}, expected one of {', '.join(by_type)}")
    classes = raw.get("architectures") or [architecture.class_name]
    if architecture.class_name not in classes:
        raise ValueError(f"{path}: is of {classes[0]}, expected {architecture.class_name}")
    if raw.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config: quantised weights cannot be trained on")
    try:
        return architecture, AutoConfig.from_pretrained(source, local_files_only=True)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"{path}: not a configuration of transformers: {error}") from None


def require_same_model(ours: ModelConfig, theirs: ModelConfig, source: Path) -> None:
    """
    Raises:
        ValueError: naming all fields that differ, of those that matter.
    """
    asked, found = ours.model_dump(), theirs.model_dump()
    differing = {key for key in found if key not in FREE and asked[key] != found[key]}
    if ours.position == "rope" and ours.max_sequence_length < theirs.max_sequence_length:
        differing.discard("max_sequence_length")  # there is no table of positions
    if differing:
        lines = [
            f"model.{key}: the config has {asked[key]!r}, {source} has {found[key]!r}"
            for key in found
            if key in differing
        ]
        raise ValueError("\n".join(lines))


def _stored_names(architecture: Architecture, names: list[str]) -> dict[str, str]:
    """Names of parameters as the whole model has them -> as they are in the file.

    Files of a model without its head have no prefix.
    """
    heads = {f"{head}.weight": "lm_head.weight" for head in ("lm_head", architecture.head_in_files)}
    (embedding,) = architecture.modules["token_embedding"][1]
    prefix = embedding.partition(".")[0] + "."
    kept = [name for name in names if not DERIVED.search(name)]
    bare = not any(name.startswith(prefix) for name in kept)
    return {heads.get(name, prefix + name if bare else name): name for name in kept}


def require_same_tokenizer(source: Path, config: RunConfig) -> None:
    """See that the source's tokenizer, where it has one, fits its weights and the run's corpora.

    Raises:
        ValueError: it has more ids than the vocabulary, or a corpus is of another one.
    """
    if not any((source / name).exists() for name in CORPUS_KEEPS.values()):
        return
    ids = load_tokenizer(source, fast=False).vocabulary_size
    vocabulary = config.model.vocabulary_size
    if ids > vocabulary:
        raise ValueError(f"{source}: its tokenizer has {ids:,} ids, its weights {vocabulary:,}")
    for corpus in config.data.train:
        manifest = read_manifest(corpus.path)
        if manifest is None:
            continue
        record = manifest.inputs.tokenizer
        own = source / CORPUS_KEEPS[record.kind]
        if not own.exists() or hashlib.sha256(own.read_bytes()).hexdigest() != record.sha256:
            raise ValueError(
                f"{corpus.path}: prepared with another tokenizer than the model's; prepare it with "
                f"--tokenizer {source}"
            )
