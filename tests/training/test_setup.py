"""What is settled before ranks talk: automatic policies, the machine, when a run rehearses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.reading import ConfigError
from configs.schema import RunConfig
from memory.machine import Machine
from memory.planner import Planner
from training.engine import Ranks
from training.setup import machine_of, policies_of, prepare

ALONE = Ranks(0, 0, 1, 1, torch.device("cpu"))
LARGER = {
    "model.layers": 4, "model.width": 64, "model.max_sequence_length": 64,
    "training.sequence_length": 64,
}  # fmt: skip


def peaks(config: RunConfig) -> dict[str, int]:
    planner = Planner(config, Machine(kind="CPU"))
    return {policy: planner.plan((policy,) * 4).gpu.peak.total for policy in ("none", "full")}  # type: ignore[arg-type]


def with_budget(altered: Callable[..., Any], budget: str | None) -> RunConfig:
    checkpointing = {"policies": "auto"} | ({"memory_budget": budget} if budget else {})
    return RunConfig.model_validate(altered({**LARGER, "activation_checkpointing": checkpointing}))


def test_auto_recomputes_no_more_than_the_budget_asks_for(altered: Callable[..., Any]) -> None:
    sizes = peaks(with_budget(altered, None))
    found = {}
    for name, budget in (("most", sizes["none"]), ("middle", sum(sizes.values()) // 2)):
        config = with_budget(altered, str(budget))
        policies = policies_of(config, machine_of(ALONE, config))
        assert Planner(config, Machine(kind="CPU")).plan(policies).gpu.peak.total <= budget
        found[name] = policies
    assert found["most"] == ("none",) * 4
    assert 0 < found["middle"].count("none") < 4
    config = with_budget(altered, None)
    assert policies_of(config, machine_of(ALONE, config)) == ("none",) * 4


def test_auto_says_what_would_fit_where_nothing_does(altered: Callable[..., Any]) -> None:
    config = with_budget(altered, str(peaks(with_budget(altered, None))["full"] * 9 // 10))
    with pytest.raises(ConfigError, match="are lacking at") as caught:
        policies_of(config, machine_of(ALONE, config))
    assert "train_micro_batch_size_per_gpu=" in str(caught.value)


def test_a_budget_is_read_only_by_auto(altered: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="memory_budget: read only where"):
        RunConfig.model_validate(altered({"activation_checkpointing": {"memory_budget": "1GiB"}}))


def test_the_ranks_of_a_host_share_its_memory(altered: Callable[..., Any]) -> None:
    config = RunConfig.model_validate(altered({}))
    one, four = (
        machine_of(replace(ALONE, world_size=n, local_world_size=n), config) for n in (1, 4)
    )
    assert one.host_memory == four.host_memory
    assert one.gpu_memory == one.host_memory
    assert four.gpu_memory == (one.host_memory or 0) // 4
    assert (four.gpus, four.ranks_per_node, four.device) == (4, 4, "cpu")


@pytest.mark.parametrize(
    ("changes", "rehearses"),
    [
        ({}, False),  # on a CPU
        ({"training.rehearse": True}, True),
        ({"training.on_out_of_memory": "adapt"}, True),
    ],
)
def test_when_a_run_rehearses(
    changes: dict[str, Any], rehearses: bool, altered: Callable[..., Any]
) -> None:
    run = prepare(RunConfig.model_validate(altered(changes)), ALONE)
    assert run.rehearses == rehearses
    on_gpu = replace(run, ranks=replace(ALONE, device=torch.device("cuda")))
    assert on_gpu.rehearses


NVME = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.on_out_of_memory": "adapt", "training.rehearse": False}, "needs"),
        ({"training.rehearse": True, "deepspeed.zero_optimization": NVME}, "cannot be undone"),
    ],
)
def test_settings_without_effect_are_refused(
    changes: dict[str, Any], message: str, altered: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(altered(changes))
