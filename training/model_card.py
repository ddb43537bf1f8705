"""The README.md of an exported model: what it is, and what it was trained on and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from data.manifest import read_manifest
from training import store
from training.run_log import read_lines
from training.tracking import LOG


def model_card(
    name: str,
    class_name: str,
    run_folder: Path,
    config: RunConfig,
    manifest: store.Manifest,
    difference: float,
) -> str:
    """Markdown.

    Args:
        difference: of transformers' logits, over the largest.
    """
    step, samples = manifest.progress["step"], manifest.progress["samples_consumed"]
    versions = ", ".join(f"{library} {version}" for library, version in manifest.versions.items())
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n",
        f"# {name}\n",
        f"A {class_name} of {config.model.parameter_count():,} parameters (the padding of its "
        f"vocabulary included), trained for {step:,} steps, on "
        f"{samples * config.training.sequence_length:,} tokens, with {versions}.\n",
        f"```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n',
        f"Logits in float32 were compared with those of the model that was trained: the largest "
        f"difference is {difference:.1e} of the largest logit.\n",
        "## Losses\n",
        losses(run_folder, step),
        "## Corpora\n",
        *[_corpus(entry.path) for entry in config.data.train],
        "## Configuration of the run\n",
        _json_block(config.model_dump()),
    ]
    if config.data.document_masking:
        parts.insert(4, "Trained with tokens that attend within their own document only.\n")
    return "\n".join(parts)


def losses(run_folder: Path, step: int) -> str:
    """The last of each kind up to the checkpoint, in nats a token."""
    try:
        entries = read_lines(run_folder / LOG)
    except (OSError, ValueError):
        return "Not recorded.\n"
    rows = ["| | step | nats a token |", "|---|---|---|"]
    for key, title in (("loss", "training"), ("validation_loss", "validation")):
        known = [entry for entry in entries if entry.get(key) is not None and entry["step"] <= step]
        rows += [f"| {title} | {e['step']:,} | {e[key]:.4f} |" for e in known[-1:]]
    return "\n".join(rows) + "\n"


def _corpus(path: str) -> str:
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return f"`{path}`: {error}\n"
    if manifest is None:
        return f"`{path}`: without a manifest.\n"
    return f"`{path}`:\n\n{_json_block(manifest.model_dump())}"


def _json_block(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=2)}\n```\n"
