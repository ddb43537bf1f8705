"""The loss at the output head: full logits against chunks, by time and by memory.

python -m benchmarks.loss --output benchmarks/results/loss_CPU_DATE.md
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from benchmarks.measure import interleave, parse_options, peak_bytes, ratio, report
from model import loss
from model.loss import next_token_loss

TOKENS, WIDTH, VOCABULARY = 2048, 384, 8192
REFERENCE = "full logits"


def contenders() -> dict[str, Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)

    def full() -> None:
        hidden.grad = weight.grad = None
        next_token_loss(
            hidden, weight, targets, vocabulary_size=VOCABULARY, method="full"
        ).backward()

    def torch_chunks(chunk: int | None) -> None:
        hidden.grad = weight.grad = None
        options = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=chunk, chunking_method=None if chunk else "auto"
        )
        torch.nn.functional.linear_cross_entropy(
            hidden, weight, targets, options=options
        ).backward()

    def own_chunks(chunk: int) -> None:
        hidden.grad = weight.grad = None
        loss.CHUNK_TOKENS = chunk
        loss._ChunkedCrossEntropy.apply(hidden, weight, None, targets, 0.0).backward()

    sizes = (128, 256, 512, 1024)
    found: dict[str, Callable[[], None]] = {REFERENCE: full}
    found["torch's chunks, its default"] = functools.partial(torch_chunks, None)
    found |= {f"torch's chunks of {n}": functools.partial(torch_chunks, n) for n in sizes}
    found |= {f"our chunks of {n}": functools.partial(own_chunks, n) for n in sizes}
    return found


def main() -> None:
    options = parse_options(__doc__)
    runs = contenders()
    peaks = {name: peak_bytes(run) for name, run in runs.items()}
    timings = interleave(runs, options.rounds)
    lines = [
        "| loss, forward and backward | speed against full logits | peak MB |",
        "|---|---|---|",
    ]
    for name, own in timings.items():
        lines.append(f"| {name} | {ratio(timings[REFERENCE], own)} | {peaks[name] / 1e6:.0f} |")
    shape = f"{TOKENS} tokens, width {WIDTH}, vocabulary {VOCABULARY}, float32"
    report(f"Loss at the output head: {shape}", lines, options.output)


if __name__ == "__main__":
    main()
