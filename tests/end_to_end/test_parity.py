"""Every ZeRO stage, offload and accumulation trains as a plain PyTorch loop does, dropout on."""

from __future__ import annotations

import math
from collections.abc import Callable
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
                rows = [
                    torch.tensor(corpus.sample(n).tolist()) for n in range(first, first + micro)
                ]
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
    world_size: int, tied: bool, altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    configs = {
        name: altered({**changes, "model.tied_embeddings": tied})
        for name, changes in variants().items()
    }
    results = train_all(configs, world_size)
    expected = {}
    for accumulation in (1, 2, 4):
        changes = {
            "deepspeed.gradient_accumulation_steps": accumulation,
            "model.tied_embeddings": tied,
        }
        expected[accumulation] = plain_loop(altered(changes), world_size)
    assert expected[1]["losses"][-1] < 0.95 * expected[1]["losses"][0], "nothing was learnt"
    assert max(expected[1]["norms"]) > 0.5, "nothing was clipped"
    for name, result in results.items():
        reference = expected[configs[name]["deepspeed"]["gradient_accumulation_steps"]]
        for key in ("losses", "norms", "lrs"):
            assert result[key] == pytest.approx(reference[key], rel=RELATIVE), f"{name}: {key}"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_update_has_the_logged_lr_and_the_clipped_norm(
    world_size: int, altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    """Plain SGD moves the weights by lr x clipped gradient, so both can be read off them."""
    configs = {}
    for stage, offload in ((0, False), (1, False), (2, False), (2, True)):
        for warmup, accumulation in ((0, 1), (1, 4), (3, 1), (3, 4)):
            zero: dict[str, Any] = {"stage": stage}
            if offload:
                zero["offload_optimizer"] = {"device": "cpu"}
            name = f"zero {stage} offload {offload} warmup {warmup} accumulation {accumulation}"
            configs[name] = altered(
                {
                    "training.max_steps": 6,
                    "deepspeed.zero_optimization": zero,
                    "deepspeed.zero_allow_untested_optimizer": True,
                    "deepspeed.zero_force_ds_cpu_optimizer": False,
                    "deepspeed.gradient_accumulation_steps": accumulation,
                    "deepspeed.gradient_clipping": 0.1,
                    "deepspeed.optimizer": {"type": "SGD", "params": {"lr": 1.0}},
                    "deepspeed.scheduler.params.warmup_num_steps": warmup,
                }
            )
    for name, result in train_all(configs, world_size).items():
        warmup = configs[name]["deepspeed"]["scheduler"]["params"]["warmup_num_steps"]
        assert min(result["norms"]) > 0.1, f"{name}: the norm is that before clipping"
        assert result["lrs"][: max(1, warmup)] == pytest.approx(
            [k / warmup for k in range(1, warmup + 1)] or [0.994], rel=1e-3
        ), name
        moved = [update / lr for update, lr in zip(result["updates"], result["lrs"], strict=True)]
        assert moved == pytest.approx([0.1] * 6, rel=1e-4), name


@pytest.mark.slow
def test_no_clipping_key_clips_at_one_and_zero_does_not_clip(
    altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    """DeepSpeed's documented default, the same at every stage; a large z-loss makes it matter."""
    configs = {}
    for stage in (0, 1, 2):
        for limit in (..., 0):
            configs[f"zero {stage} {'0' if limit == 0 else 'absent'}"] = altered(
                {
                    "training.max_steps": 3,
                    "training.z_loss": 10.0,
                    "deepspeed.zero_optimization": {"stage": stage},
                    "deepspeed.zero_allow_untested_optimizer": True,
                    "deepspeed.gradient_clipping": limit,
                    "deepspeed.optimizer": {"type": "SGD", "params": {"lr": 0.01}},
                }
            )
    for name, result in train_all(configs, 1).items():
        assert min(result["norms"]) > 2, f"{name}: nothing to clip"
        moved = [update / lr for update, lr in zip(result["updates"], result["lrs"], strict=True)]
        expected = result["norms"] if name.endswith("0") else [1.0] * 3
        assert moved == pytest.approx(expected, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_adam_and_adamw_are_what_they_are_called(
    kind: str, altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    """The first step from zero moments is lr x sign(gradient), decay inside (Adam) or outside."""
    lr, decay = 0.01, 0.1
    changes = {
        "model.dropout": 0.0,
        "training.max_steps": 1,
        "deepspeed.gradient_clipping": 1e9,
        "deepspeed.gradient_accumulation_steps": 1,
        "deepspeed.optimizer": {
            "type": kind,
            "params": {"lr": lr, "weight_decay": decay, "eps": 1e-12},
        },
        "deepspeed.scheduler.params.warmup_num_steps": 1,
    }
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    configs = {
        "resident": altered(changes),
        # DeepSpeed's own CPU Adam, compiled on first use.
        "offload": altered({**changes, "deepspeed.zero_optimization": offload}),
    }
    run = RunConfig.model_validate(configs["resident"])
    model = build(run.model, seed=run.training.seed)
    corpus = Corpus(run.data.train[0].path, 16, run.training.seed, vocabulary_size=67)
    tokens = torch.stack([torch.tensor(corpus.sample(n).tolist()) for n in range(8)])
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    weight = model.blocks[0].mlp.up.weight
    row, gradient = weight[0].detach(), weight.grad[0]
    if kind == "AdamW":
        expected = row - lr * (gradient.sign() + decay * row)
    else:
        expected = row - lr * (gradient + decay * row).sign()
    for name, result in train_all(configs, 1).items():
        assert result["row"][0] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-7), name
