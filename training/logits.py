"""Do weights of ours and a transformers folder compute the same?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from configs.schema import RunConfig
from data.dataset import Corpus
from model.config import ModelConfig
from model.gpt import GPT, Context
from training.weights import Read

TOLERANCE = 1e-4
"""Largest difference over largest logit, in float32. Sums of another order differ by 1e-6."""
TOKENS = 256
"""Of each of the two rows that are compared."""


class LogitsDiffer(RuntimeError):
    """A conversion that would change what the model computes."""


@torch.inference_mode()
def compare_logits(folder: Path, config: ModelConfig, read: Read, tokens: Tensor) -> float:
    """Load a folder with transformers; returns the largest difference of logits over the largest.

    Both sides compute in float32. All of transformers' weights are in memory, and of ours the
    embeddings and one block.

    Args:
        tokens: [batch, time].

    Raises:
        LogitsDiffer: by more than rounding, or a weight was not found under its name.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    theirs, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise LogitsDiffer(f"transformers does not find {', '.join(missing)} in {folder}")
    expected = theirs.eval()(tokens).logits
    differences = (logits(config, read, tokens) - expected).abs()
    difference = float(differences.max() / expected.abs().max())
    if not difference <= TOLERANCE:  # NaN is no agreement either
        raise LogitsDiffer(
            f"transformers' logits differ by {difference:.2g} of the largest, where rounding "
            f"explains {TOLERANCE:g}"
        )
    return difference


@torch.inference_mode()
def logits(config: ModelConfig, read: Read, tokens: Tensor) -> Tensor:
    """Float32 logits [batch, time, vocabulary], with one block's weights in memory at a time."""
    with torch.device("meta"):
        model = GPT(config).eval()

    def run_block(index: int, block: nn.Module, x: Tensor, context: Context) -> Tensor:
        weights = {name: read(f"blocks.{index}.{name}") for name, _ in block.named_parameters()}
        weights = {name: weight.float() for name, weight in weights.items()}
        result: Tensor = torch.func.functional_call(block, weights, (x, *context))
        return result

    model.run_block = run_block
    outside = [name for name, _ in model.named_parameters() if not name.startswith("blocks.")]
    weights = {name: read(name).float() for name in outside}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_embeddings()
    return model(tokens)[..., : config.vocabulary_size]


def tokens_to_compare(config: RunConfig) -> Tensor:
    """[2, time]: the beginning of the validation data, where it is there, and ids from the whole
    vocabulary."""
    vocabulary = config.model.vocabulary_size
    time = min(TOKENS, config.training.sequence_length)
    spread = np.linspace(0, vocabulary - 1, time).astype(np.int64)
    path = next(iter(config.data.validation_sets.values()))
    try:
        corpus = Corpus(path, time, 0, vocabulary_size=vocabulary, shuffle=False)
        real = corpus.sample(0)[:time]
    except (OSError, ValueError):  # moved away since: the other row still tells
        real = spread[::-1]
    return torch.from_numpy(np.stack([real, spread]))
