"""Plans, cures and dry runs of policies that are left to the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from configs.reading import ConfigError
from configs.schema import RunConfig, changed
from memory.cost import SPEEDS
from memory.cures import BUDGET, Cure, cures, milder, policy_cure, search
from memory.diagnosis import Figures, Observation
from memory.doctor import diagnose
from memory.dry_run import run_dry
from memory.fit import fit, plan, uniform
from memory.machine import Machine
from memory.planner import GIB, Planner, model_parameters
from memory.policies import Policy

BLOCKS = 4


@pytest.fixture
def automatic(altered: Callable[..., Any]) -> RunConfig:
    """Blocks large enough for what they keep to matter beside a GPU's allowances."""
    raw = altered(
        {
            "model.layers": BLOCKS,
            "model.width": 512,
            "model.heads": 8,
            "model.max_sequence_length": 1024,
            "model.vocabulary_size": 512,
            "training.sequence_length": 1024,
            "deepspeed.train_batch_size": 16,
            "deepspeed.train_micro_batch_size_per_gpu": 8,
            "deepspeed.gradient_accumulation_steps": "auto",
            "deepspeed.bf16": {"enabled": True},
            "deepspeed.zero_optimization.stage": 2,
            "activation_checkpointing.policies": "auto",
        }
    )
    return RunConfig.model_validate(raw)


def peak(config: RunConfig, policy: Policy) -> int:
    planner = Planner(config, Machine())
    return planner.plan(uniform(planner, policy)).gpu.peak.total


def between(config: RunConfig) -> int:
    """Bytes that hold some blocks without recomputation, and not all."""
    return (peak(config, "none") + peak(config, "full")) // 2


def test_a_plan_has_the_policies_that_fit(automatic: RunConfig) -> None:
    assert plan(automatic, Machine()).policies == ("none",) * BLOCKS
    machine = Machine(gpu_memory=between(automatic))
    chosen = plan(automatic, machine)
    assert chosen.fits
    assert 0 < chosen.policies.count("none") < BLOCKS
    assert chosen == fit(Planner(automatic, machine)).plan


@pytest.mark.parametrize("device", [None, 80 * GIB])
def test_the_budget_limits_what_the_device_has(automatic: RunConfig, device: int | None) -> None:
    limit = between(automatic)
    config = changed(automatic, {BUDGET: str(limit)})
    chosen = plan(config, Machine(gpu_memory=device))
    assert chosen.gpu.limit == limit
    assert chosen.policies == plan(automatic, Machine(gpu_memory=limit)).policies


def test_the_device_limits_the_budget(automatic: RunConfig) -> None:
    config = changed(automatic, {BUDGET: "80GiB"})
    assert plan(config, Machine(gpu_memory=between(automatic))).gpu.limit == between(automatic)


def test_a_budget_that_is_no_size_is_named(automatic: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.memory_budget: 'lots'"):
        plan(changed(automatic, {BUDGET: "lots"}), Machine())


def holds(config: RunConfig, cure: Cure) -> None:
    """A cure's changes lead to its plan, on a GPU that has more than the run may use."""
    then = plan(changed(config, cure.changes), cure.machine._replace(gpu_memory=80 * GIB))
    assert then.policies == cure.plan.policies, cure.changes
    assert then.gpu.peak.total == cure.plan.gpu.peak.total


@pytest.mark.parametrize("budget", [False, True])
def test_cures_mean_what_they_say(automatic: RunConfig, budget: bool) -> None:
    limit = int(peak(automatic, "full") * 0.95)
    config = changed(automatic, {BUDGET: f"{limit}B"}) if budget else automatic
    machine = Machine(gpu_memory=limit)
    now = plan(config, machine)
    assert not now.fits
    found = [*cures(config, machine, now), search(config, machine, frozenset({"micro_batch"}))]
    assert any(cure.plan.fits for cure in found)
    for cure in found:
        holds(config, cure)
        assert (BUDGET in cure.changes) != budget, "it is there already"


def test_milder_settings_are_those_of_a_smaller_budget(automatic: RunConfig) -> None:
    machine = Machine(gpu_memory=between(automatic))
    now = plan(automatic, machine)
    cure = milder(automatic, machine, now)
    assert cure is not None
    assert cure.plan.gpu.peak.total < 0.97 * now.gpu.peak.total
    holds(automatic, cure)
    assert policy_cure(automatic, machine).plan == now


def test_the_doctor_prescribes_a_budget(automatic: RunConfig) -> None:
    now = plan(automatic, Machine(gpu_memory=80 * GIB))
    figures = Figures("device", 2**20, capacity=between(automatic))
    report = diagnose(Observation("", "block 3 backward", 0, "cuda", figures), automatic, now)
    assert report.cures[0].fits
    budgets = [cure for cure in report.cures if BUDGET in cure.changes]
    assert budgets
    for cure in budgets:
        then = plan(changed(automatic, cure.changes), Machine(gpus=cure.gpus or 1))
        assert now.gpu.peak.total - then.gpu.peak.total == cure.saving


@pytest.mark.parametrize("policies", [("none", "selective", "full", "offload"), ("none",) * 4])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_dry_run_reaches_every_parameter(
    automatic: RunConfig, policies: tuple[Policy, ...], tensor_parallel: int
) -> None:
    changes = {"deepspeed.tensor_parallel": {"autotp_size": tensor_parallel}}
    config = changed(automatic, changes)
    expected = model_parameters(config.model, True, tensor_parallel)
    count = run_dry(Planner(config, Machine(gpus=2)), policies)
    assert count == sum(parameter.size for parameter in expected)
    if tensor_parallel == 1:
        assert count == config.model.parameter_count()


def test_a_dry_run_names_what_has_no_gradient(
    automatic: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.gpt import GPT

    def skip_a_block(self: Any, tokens: Any, targets: Any) -> Any:
        x, context = self.begin(tokens)
        for number in (0, 1, 3):
            x = self.run_block(number, self.blocks[number], x, context)
        return self.head(self.final_norm(x), targets)

    monkeypatch.setattr(GPT, "forward", skip_a_block)
    with pytest.raises(AssertionError, match=r"no gradient: blocks\.2\."):
        run_dry(Planner(automatic, Machine()), ("none",) * BLOCKS)


def test_sums_of_offloaded_gradients_travel_in_16_bits_only(automatic: RunConfig) -> None:
    """In bf16 each micro-batch but the first brings the sum to the GPU and all go to the host.

    In float32 (data_types.grad_accum_dtype) the sum stays on the GPU.
    """
    offload = {"deepspeed.zero_optimization.offload_optimizer": {"device": "cpu"}}
    steps = {"deepspeed.train_batch_size": 8 * 5 * 2}
    config = changed(automatic, {**offload, **steps})
    wide = changed(config, {"deepspeed.data_types": {"grad_accum_dtype": "fp32"}})
    times = [
        Planner(run, Machine(gpus=2)).step_time(("none",) * BLOCKS).communication
        for run in (config, wide)
    ]
    share = config.model.parameter_count() / 2
    expected = 2 * 4 * share * 2 / SPEEDS["H100"].host_link
    assert times[0] - times[1] == pytest.approx(expected)
