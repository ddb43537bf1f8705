"""A replica held by two ranks together trains as a plain PyTorch loop on one process does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import RunConfig
from data.dataset import Corpus
from model.gpt import GPT, build, causal_attention
from tests.conftest import read_metrics
from tests.end_to_end import test_parity as parity
from training.checkpoint import load_model

# Two partial sums are added instead of one long one: float32 rounding, grown over 20 steps of Adam.
RELATIVE = parity.RELATIVE

SPLIT = {"deepspeed.tensor_parallel": {"autotp_size": 2}}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "neox": {"model.preset": "neox"},
    "llama": {
        "model.preset": "llama",
        "model.heads": 8,
        "model.kv_heads": 2,
        "model.mlp_width": 48,
        "model.qk_norm": True,
    },
    "qk layernorm": {"model.qk_norm": True, "model.mlp": "swiglu", "model.mlp_width": 48},
}
STAGES: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    *({"stage": stage, "offload_optimizer": {"device": "cpu"}} for stage in (1, 2, 3)),
]


@pytest.fixture
def train_all(command: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Train configurations, by name, in one launch; a dictionary of results for each rank."""

    def train(configs: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
        given, written = tmp_path / "configs.json", tmp_path / "results"
        given.write_text(json.dumps(configs))
        worker = str(Path(__file__).with_name("tensor_parallel_worker.py"))
        done = command.python(worker, str(given), str(written), ranks=ranks, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        return [torch.load(f"{written}.{rank}", weights_only=True) for rank in range(ranks)]

    return train


def attend_in_two_parts(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """The masks of two ranks with half of the heads each, drawn in one process."""
    seed = int(torch.randint(2**62, ()))
    parts = []
    for rank, heads in enumerate(zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True)):
        with torch.random.fork_rng([]):
            torch.manual_seed(seed + rank)
            parts.append(causal_attention(*heads, dropout))
    return torch.cat(parts, dim=1)


def build_with_two_masks(*arguments: Any, **options: Any) -> GPT:
    model = build(*arguments, **options)
    model.run_block = lambda index, block, x, context: block(x, context.rotary, attend_in_two_parts)
    return model


def share(model: RunConfig, name: str, whole: Tensor, rank: int) -> Tensor:
    """What the rank holds of a parameter, written out for each layer."""
    sizes = model.model
    if ".attention.qkv." in name:
        keys = sizes.width // sizes.heads * sizes.kv_heads
        q, k, v = whole[: sizes.width], whole[sizes.width : -keys], whole[-keys:]
        return torch.cat([part[len(part) // 2 * rank :][: len(part) // 2] for part in (q, k, v)])
    if ".mlp.up." in name:
        parts = whole.chunk(2) if sizes.mlp == "swiglu" else (whole,)
        return torch.cat([part.chunk(2)[rank] for part in parts])
    if name.endswith((".attention.output.weight", ".mlp.down.weight")):
        return whole.chunk(2, dim=1)[rank]
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dropout", "ranks"),
    [*((model, 0.1, 2) for model in MODELS), ("gpt2", 0.0, 2), ("llama", 0.1, 4)],
)
def test_same_training_as_one_process(
    model: str,
    dropout: float,
    ranks: int,
    altered: Callable[..., Any],
    train_all: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = MODELS[model] | {"model.dropout": dropout}
    configs = {}
    for zero in STAGES:
        zero_changes: dict[str, Any] = {"deepspeed.zero_optimization": zero}
        if "offload_optimizer" in zero:
            zero_changes["deepspeed.optimizer.params.torch_adam"] = True
        configs[json.dumps(zero)] = altered(changes | SPLIT | zero_changes)
    results = train_all(configs, ranks)

    plain = altered(changes)
    if dropout:
        monkeypatch.setattr(parity, "build", build_with_two_masks)
    expected = parity.plain_loop(plain, ranks // 2)
    assert max(expected["norms"]) > 0.5, "nothing was clipped"
    run = RunConfig.model_validate(plain)
    whole = dict(build(run.model, seed=run.training.seed).named_parameters())
    for name in configs:
        for rank, found in enumerate(result[name] for result in results):
            for key in ("losses", "norms", "lrs"):
                assert found[key] == pytest.approx(expected[key], rel=RELATIVE), f"{name}: {key}"
            for parameter, weight in found["start"].items():
                expected_share = share(run, parameter, whole[parameter], rank % 2)
                assert torch.equal(weight, expected_share), f"{name}: {parameter} at the start"
            for parameter, weight in found["end"].items():
                replicated = weight.shape == whole[parameter].shape
                twin = results[0 if replicated else rank % 2][name]["end"][parameter]
                assert torch.equal(weight, twin), f"{name}: {parameter} differs between ranks"
    assert results[0][json.dumps(STAGES[0])]["start"].keys() == whole.keys()


@pytest.mark.slow
def test_checkpointed_blocks_train_identically(
    altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    """DeepSpeed's row-parallel sum overwrites the product that selective checkpointing keeps."""
    configs = {
        f"{policy} {stage}": altered(
            MODELS["qk layernorm"]
            | SPLIT
            | {
                "deepspeed.zero_optimization": {"stage": stage},
                "activation_checkpointing": {"policies": {policy: "all"}},
            }
        )
        for policy in ("none", "selective", "full")
        for stage in (0, 3)
    }
    for rank, result in enumerate(train_all(configs, 2)):
        for name, found in result.items():
            expected = result[f"none {name.split()[1]}"]
            for key in ("losses", "norms"):
                assert found[key] == expected[key], f"{name} on rank {rank}: {key}"


@pytest.mark.slow
def test_two_ranks_hold_half_of_every_cut_matrix(
    altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    config = altered({**MODELS["llama"], **SPLIT, "training.max_steps": 1})
    for result in train_all({"one": config}, 2):
        weights = result["one"]["start"]
        sizes = {name: weights[f"blocks.0.{name}.weight"].numel() for name in (
            "attention.qkv", "attention.output", "mlp.up", "mlp.down", "attention_norm",
        )}  # fmt: skip
        # Width 32, 8 query and 2 x 2 key and value heads of width 4, swiglu of width 48.
        assert sizes == {
            "attention.qkv": (32 + 2 * 8) * 32 // 2,
            "attention.output": 32 * 32 // 2,
            "mlp.up": 2 * 48 * 32 // 2,
            "mlp.down": 48 * 32 // 2,
            "attention_norm": 32,
        }
        whole = RunConfig.model_validate(config).model.parameter_count()
        assert sum(w.numel() for w in weights.values()) == whole - 2 * sum(
            size for name, size in sizes.items() if name != "attention_norm"
        )


@pytest.mark.slow
def test_partitioned_checkpoints_keep_half_of_a_blocks_input(
    altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    """Per rank, of two that hold one replica, and nothing else but two states of a generator."""
    configs = {
        f"{backend['reentrant']}, {partition}": altered(
            {
                **SPLIT,
                "training.max_steps": 1,
                "activation_checkpointing": {"backend": "deepspeed", "policies": {"full": "all"}}
                | backend,
                "deepspeed.activation_checkpointing": {"partition_activations": partition},
            }
        )
        for backend in ({"reentrant": False}, {"reentrant": True})
        for partition in (False, True)
    }
    for results in train_all(configs, 2):
        for name, result in results.items():
            whole, kept = result["kept"]["input"], result["kept"]["kept"]
            expected = whole // 2 if name.endswith("True") else whole
            others = 2 * torch.get_rng_state().nbytes + 64  # and the shapes of both, as tensors
            assert expected <= kept <= expected + others, name
            assert others < whole // 8, "too small an input to tell"


@pytest.mark.slow
def test_bfloat16_has_the_whole_norm_from_stage_1_on(
    altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    """Stage 0, which is refused, leaves out what only the second rank holds."""
    changes = {"model.dropout": 0.0, "training.max_steps": 1, "deepspeed.bf16": {"enabled": True}}
    names = {"stage 1": 1, "stage 2": 2, "stage 3": 3, "run as stage 0": 1}
    configs = {
        name: altered({**changes, **SPLIT, "deepspeed.zero_optimization": {"stage": stage}})
        for name, stage in names.items()
    }
    results, _ = train_all(configs, 2)
    run = RunConfig.model_validate(altered({"model.dropout": 0.0}))
    model = build(run.model, seed=run.training.seed)
    corpus = Corpus(run.data.train[0].path, 16, run.training.seed, vocabulary_size=67)
    tokens = torch.stack([torch.tensor(corpus.sample(n).tolist()) for n in range(8)])
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    whole = sum(p.grad.square().sum().item() for p in model.parameters())
    missing = sum(
        (p.grad - _first_rank_only(run, name, p.grad)).square().sum().item()
        for name, p in model.named_parameters()
    )
    for stage in (1, 2, 3):
        assert results[f"stage {stage}"]["norms"] == pytest.approx([whole**0.5], rel=2e-3)
    assert results["run as stage 0"]["norms"] == pytest.approx([(whole - missing) ** 0.5], rel=2e-3)
    assert (whole - missing) ** 0.5 < 0.99 * whole**0.5


def _first_rank_only(run: RunConfig, name: str, gradient: Tensor) -> Tensor:
    """The gradient with zeros where the second rank holds the weight."""
    mine = torch.arange(gradient.numel()).view_as(gradient)
    kept = torch.zeros(gradient.numel(), dtype=torch.bool)
    kept[share(run, name, mine, 0).flatten()] = True
    return gradient * kept.view_as(gradient)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), [("llama", 0), ("gpt2", 2), ("gpt2", 3)])
def test_resumed_is_identical_and_the_joined_weights_have_the_logged_loss(
    model: str,
    stage: int,
    altered: Callable[..., Any],
    command: Any,
    losses: Callable[[str], dict[int, float]],
    tmp_path: Path,
) -> None:
    changes = MODELS[model] | SPLIT | {"deepspeed.zero_optimization": {"stage": stage}}
    whole = altered(changes | {"training.run_folder": str(tmp_path / "whole")})
    done = command.train(whole, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tensor parallel size 2" in done.stdout
    halved = altered(changes | {"training.run_folder": str(tmp_path / "halved")})
    for arguments in (("--set", "training.max_steps=10"), ()):
        done = command.train(halved, *arguments, ranks=2)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "step-00000010" in done.stdout
    expected = losses(str(tmp_path / "whole"))
    assert losses(str(tmp_path / "halved")) == expected
    assert list(expected) == list(range(1, 21))

    joined, config = load_model(tmp_path / "whole")
    corpus = Corpus(config.data.validation, 16, 0, vocabulary_size=67, shuffle=False)
    tokens = torch.stack([torch.tensor(corpus.sample(n).tolist()) for n in range(8)])
    joined.eval()
    with torch.no_grad():
        loss = joined(tokens[:, :-1], tokens[:, 1:]).item()
    logged = [line["validation_loss"] for line in read_metrics(tmp_path / "whole")
              if "validation_loss" in line]  # fmt: skip
    assert loss == pytest.approx(logged[-1], rel=1e-6)
    assert loss < 0.95 * logged[0], "nothing was learnt"
