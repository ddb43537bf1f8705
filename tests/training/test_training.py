"""Seeds, ranks, evaluation and the run folder, without an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

import train
from configs.reading import ConfigError
from configs.schema import RunConfig
from data.dataset import VocabularyError
from memory.recompute import RecomputationError, apply_policies, explain_recomputation
from model.gpt import build
from training import checkpoint
from training.engine import Ranks, read_ranks, seed_step, start_process_group
from training.evaluate import validation_loss
from training.extensions import BuildError
from training.saver import SaveFailed
from training.unpickling import Refused

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher; whatever read_ranks sets is undone."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in list(os.environ):
        if name in NAMES or name.startswith(("OMPI_", "PMI_", "LOCAL_SIZE")):
            del os.environ[name]
    return monkeypatch


def draws(seed: int, step: int, rank: int) -> list[float]:
    seed_step(seed, step, rank)
    return torch.rand(4).tolist()


def test_dropout_differs_by_step_and_rank_and_comes_back() -> None:
    all_draws = [draws(1, step, rank) for step in range(3) for rank in range(3)]
    assert len({tuple(values) for values in all_draws}) == 9
    assert draws(1, 2, 1) == all_draws[7]
    assert draws(2, 2, 1) != all_draws[7]


def test_alone_without_a_launcher(environment: pytest.MonkeyPatch) -> None:
    ranks = read_ranks()
    assert (ranks.rank, ranks.local_rank, ranks.world_size) == (0, 0, 1)
    # All five, or DeepSpeed goes looking for MPI.
    assert all(os.environ[name] for name in NAMES[:5])
    assert os.environ["MASTER_PORT"] != "29500"


@pytest.mark.parametrize("prefix", ["OMPI_COMM_WORLD_", "PMI_"])
def test_mpi_names_are_mapped(environment: pytest.MonkeyPatch, prefix: str) -> None:
    local = "OMPI_COMM_WORLD_LOCAL_RANK" if prefix.startswith("OMPI") else "MPI_LOCALRANKID"
    os.environ.update({f"{prefix}RANK": "3", f"{prefix}SIZE": "4", local: "1"})
    with pytest.raises(ValueError, match="also set MASTER_ADDR and MASTER_PORT"):
        read_ranks()
    os.environ.update({"MASTER_ADDR": "here", "MASTER_PORT": "1234"})
    ranks = read_ranks()
    assert (ranks.rank, ranks.local_rank, ranks.world_size) == (3, 1, 4)


@pytest.mark.parametrize(
    ("variables", "argument", "expected"),
    [
        ({"WORLD_SIZE": "2"}, None, "RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 0, "contradicts LOCAL_RANK=1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, None, "RANK"),
    ],
)
def test_contradicting_launchers(
    environment: pytest.MonkeyPatch, variables: dict[str, str], argument: Any, expected: str
) -> None:
    os.environ.update(variables)
    with pytest.raises(ValueError, match=expected):
        read_ranks(argument)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"},
            "max_split_size_mb:128,expandable_segments:True",
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
            "expandable_segments:False,expandable_segments:True",
        ),
    ],
)
@pytest.mark.parametrize("wanted", [True, False])
def test_expandable_segments_are_asked_for_before_the_device_is_used(
    environment: pytest.MonkeyPatch, variables: dict[str, str], expected: str, wanted: bool
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment.delenv(name, raising=False)
    os.environ.update(variables)
    calls: list[Any] = []
    environment.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    environment.setattr(torch.cuda, "set_device", calls.append)
    environment.setattr(deepspeed, "init_distributed", lambda **_: None)
    device = torch.device("cuda", 1)
    start_process_group(Ranks(1, 1, 2, 2, device), expandable_segments=wanted)
    assert calls == ([expected] if wanted else []) + [device]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["model.layers: unlike the weights"]), 2),
        (VocabularyError("token 900"), 2),
        (BuildError("no compiler"), 1),
        (ConnectionError("port taken"), 1),
        (checkpoint.NoCheckpoint("none complete"), 1),
        (Refused("states.pt"), 1),
        (SaveFailed("disk full"), 1),
    ],
)
def test_what_is_found_wrong_after_the_ranks_have_met_is_one_line(
    environment: pytest.MonkeyPatch,
    run_config: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(run_config))

    def fail(*_: Any) -> None:
        raise error

    store = torch.distributed.HashStore()
    environment.setattr("training.alarm.distributed_c10d._get_default_store", lambda: store)
    environment.setattr(train, "start_process_group", lambda *_, **__: None)
    environment.setattr(train, "resume", lambda run, **_: run)
    environment.setattr(train, "train", fail)
    assert train.main(["--config", str(path)]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


class PlainEngine:
    """What a step and validation_loss need of an engine, around a bare model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = model
        self.device = torch.device("cpu")

    @property
    def training(self) -> bool:
        return self.module.training

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self.training == torch.is_grad_enabled()
        return self.module(inputs, targets)

    def gradient_accumulation_steps(self) -> int:
        return 1

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        pass

    def was_step_applied(self) -> bool:
        return True


@pytest.fixture(scope="module")
def _process_group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_validation_is_the_mean_over_samples_without_dropout(run_config: dict[str, Any]) -> None:
    model = build(RunConfig.model_validate(run_config).model, seed=0)
    engine = PlainEngine(model)
    tokens = torch.randint(0, 67, (7, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batches = [
        (inputs[:4], targets[:4], 4),
        (inputs[4:], targets[4:], 3),
        (inputs[:1], targets[:1], 0),  # a rank that has run out of samples
    ]
    loss = validation_loss(engine, batches)
    assert model.training, "back in training mode, dropout active again"
    assert torch.is_grad_enabled()
    model.eval()
    assert loss == pytest.approx(model(inputs, targets).item(), rel=1e-6)


@pytest.mark.usefixtures("_process_group")
def test_a_failed_evaluation_leaves_training_mode_on(run_config: dict[str, Any]) -> None:
    model = build(RunConfig.model_validate(run_config).model, seed=0)
    wrong = torch.full((1, 40), 1)  # longer than the model
    with pytest.raises(ValueError, match="40 tokens"):
        validation_loss(PlainEngine(model), [(wrong, wrong, 1)])
    assert model.training
    assert torch.is_grad_enabled()


class Moody(torch.nn.Module):
    """A block that changes what it does after the first call."""

    def __init__(self, block: torch.nn.Module, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.second, self.calls = block, second, 0

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        self.calls += 1
        x = self.block(x, *context)
        return x * x if self.calls == 1 else self.second(x)


SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "the same": lambda x: x * x,
    "another dtype": lambda x: x.double() * x.double(),
    "another shape": lambda x: x[:, :1] * x[:, :1],
    "fewer tensors": lambda x: x,
    "another operator": lambda x: (x @ x.mT[0]) @ x,
}


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("second", SECOND)
def test_a_block_that_computes_otherwise_in_backward_is_named(
    run_config: dict[str, Any], policy: Any, second: str
) -> None:
    model = build(RunConfig.model_validate(run_config).model, seed=0)
    model.blocks[1] = Moody(model.blocks[1], SECOND[second])
    apply_policies(model, (policy, policy))
    tokens = torch.randint(0, 67, (2, 17))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if second == "the same":
        train.train_step(PlainEngine(model), iter([batch]))
        return
    with pytest.raises(RecomputationError, match=r"^block 1: .*a counter") as caught:
        train.train_step(PlainEngine(model), iter([batch]))
    assert isinstance(caught.value.__cause__, CheckpointError)


def test_other_errors_of_a_backward_pass_stay_as_they_are(run_config: dict[str, Any]) -> None:
    model = build(RunConfig.model_validate(run_config).model, seed=0)
    apply_policies(model, ("full", "full"))
    with pytest.raises(RuntimeError, match="does not require grad"), explain_recomputation(model):
        torch.zeros(()).backward()


def test_what_may_change_when_a_run_goes_on(altered: Callable[..., Any]) -> None:
    def config(changes: dict[str, Any]) -> RunConfig:
        return RunConfig.model_validate(altered(changes))

    free: dict[str, Any] = {
        "training.max_steps": 99,
        "training.log_interval": 7,
        "data.validation": "elsewhere",
        "data.schedule": [{"from_tokens": 1000, "weights": [2]}],
        "training.expandable_segments": True,
        "training.save_in_background": False,
        "training.keep_last": 3,
    }
    free["activation_checkpointing"] = {"policies": {"full": "all"}}
    assert checkpoint.config_differences(config({}), config(free)) == []
    changed = {"deepspeed.optimizer.params.lr": 0.5, "deepspeed.bf16": {"enabled": True}}
    assert checkpoint.config_differences(config({}), config(changed)) == [
        "deepspeed.bf16.enabled: the run has null, the config true",
        "deepspeed.optimizer.params.lr: the run has 0.01, the config 0.5",
    ]
