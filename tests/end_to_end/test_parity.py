"""Every ZeRO stage, offload and accumulation trains as a plain PyTorch loop does, dropout on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
from data.dataset import Corpus
from model.gpt import build, parameter_groups
from training.engine import seed_step

STEPS = 20

# Reduction order differs between stages; float32 rounding grows over 20 steps of Adam to this.
RELATIVE = 2e-5


def plain_loop(config: dict[str, Any], world_size: int) -> dict[str, list[float]]:
    """The same training with nothing but torch: no engine, loader, schedule or trainer of ours."""
    run = RunConfig.model_validate(config)
    training, section = run.training, run.deepspeed
    accumulation = section["gradient_accumulation_steps"]
    batch = section["train_batch_size"]
    micro = batch // accumulation // world_size
    params = section["optimizer"]["params"]
    model = build(run.model, seed=training.seed)
    groups = parameter_groups(model, weight_decay=params["weight_decay"], decay_embeddings=True)
    optimizer = torch.optim.AdamW(groups, lr=params["lr"], betas=params["betas"])
    corpus = Corpus(
        run.data.train[0].path, training.sequence_length, training.seed, vocabulary_size=67
    )
    result: dict[str, list[float]] = {"losses": [], "norms": [], "lrs": []}
    for step in range(1, STEPS + 1):
        if step <= 4:
            lr = params["lr"] * step / 4
        else:
            cosine = (1 + math.cos(math.pi * (step - 4) / 16)) / 2
            lr = params["lr"] * (0.1 + 0.9 * cosine)
        total = 0.0
        for rank in range(world_size):
            seed_step(training.seed, step, rank)
            for number in range(accumulation):
                first = (step - 1) * batch + number * micro * world_size + rank * micro
                rows = [torch.tensor(corpus.sample(n).tolist()) for n in range(first, first + micro)]
                tokens = torch.stack(rows)  # [micro, sequence length + 1]
                loss = model(tokens[:, :-1], tokens[:, 1:]) / accumulation / world_size
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section["gradient_clipping"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(total)
        result["norms"].append(norm.item())
        result["lrs"].append(lr)
    return result


def variants() -> dict[str, dict[str, Any]]:
    """Changes to the configuration, by name."""
    found: dict[str, dict[str, Any]] = {}
    for stage in (0, 1, 2, 3):
        for accumulation in (1, 2, 4):
            for offload in (False, True) if stage else (False,):
                changes: dict[str, Any] = {
                    "deepspeed.zero_optimization": {"stage": stage},
                    "deepspeed.gradient_accumulation_steps": accumulation,
                }
                if offload:
                    changes["deepspeed.zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
                    changes["deepspeed.optimizer.params.torch_adam"] = True
                name = f"zero {stage} accumulation {accumulation} offload {offload}"
                found[name] = changes
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_same_losses_as_plain_torch(
    world_size: int, tied: bool, altered: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    configs = {
        name: altered({**changes, "model.tied_embeddings": tied})
        for name, changes in variants().items()
    }
    given, written = tmp_path / "configs.json", tmp_path / "results.json"
    given.write_text(json.dumps(configs))
    worker = str(Path(__file__).with_name("parity_worker.py"))
    done = command.python(worker, str(given), str(written), ranks=world_size)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(written.read_text())
    expected = {
        accumulation: plain_loop(
            altered(
                {
                    "deepspeed.gradient_accumulation_steps": accumulation,
                    "model.tied_embeddings": tied,
                }
            ),
            world_size,
        )
        for accumulation in (1, 2, 4)
    }
    assert expected[1]["losses"][-1] < 0.95 * expected[1]["losses"][0], "nothing was learnt"
    assert max(expected[1]["norms"]) > 0.5, "nothing was clipped"
    for name, result in results.items():
        reference = expected[configs[name]["deepspeed"]["gradient_accumulation_steps"]]
        for key in ("losses", "norms", "lrs"):
            assert result[key] == pytest.approx(reference[key], rel=RELATIVE), f"{name}: {key}"
