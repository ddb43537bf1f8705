"""Command: sample text from a run's newest checkpoint.

python -m training.generate --checkpoint runs/quickstart --prompt "def "
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from data.tokenizer import load_tokenizer
from model.generate import generate
from training.checkpoint import load_model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog='example: python -m training.generate --checkpoint runs/quickstart --prompt "def "',
    )
    parser.add_argument("--checkpoint", required=True, type=Path, help="a run folder")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token"
    )
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        print(sample(options))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def sample(options: argparse.Namespace) -> str:
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed tells every step of the loading
        model, config = load_model(options.checkpoint)
    tokenizer = load_tokenizer(config.data.tokenizer_path, fast=False)
    prompt = tokenizer.encode(options.prompt) or [tokenizer.end_of_document]
    tokens = generate(
        model,
        torch.tensor([prompt]),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        stop_token=tokenizer.end_of_document,
    )
    return tokenizer.decode(tokens[0].tolist())


if __name__ == "__main__":
    sys.exit(main())
