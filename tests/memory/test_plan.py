"""The planner, the choice of policies and the command, against hand calculation and brute force."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from configs.deepspeed import Hardware, warnings_of
from configs.schema import RunConfig, changed
from memory.cures import cures
from memory.fit import candidates, fit, plan, uniform
from memory.ledger import Sample
from memory.machine import Machine, parse_bytes, show_bytes
from memory.plan import main
from memory.planner import GIB, Plan, Planner
from memory.policies import Policy, as_names
from tests.conftest import Command

H, V, LAYERS, RANKS = 6144, 50432, 44, 8
MATRICES = 12 * H * H
"""Of one block: 3 for queries, keys and values, 1 behind attention, 4 and 4 of the MLP."""
VECTORS = 13 * H
"""Of one block: biases 3 + 1 + 4 + 1, and weight and bias of two norms."""
COUNT = LAYERS * (MATRICES + VECTORS) + 2 * H + 2 * V * H
TWENTY_B = {
    "preset": "neox",
    "layers": LAYERS,
    "width": H,
    "heads": 64,
    "vocabulary_size": V,
    "max_sequence_length": 2048,
}
SMALL = {"width": 64, "heads": 4, "vocabulary_size": 256, "max_sequence_length": 128}


def run(
    model: dict[str, Any], zero: dict[str, Any], micro: int = 2, steps: int = 1, **others: Any
) -> RunConfig:
    config = RunConfig.model_validate(
        {
            "model": model,
            "data": {"train": [{"path": "train"}], "validation": "validation"},
            "training": {
                "max_steps": 10,
                "sequence_length": model["max_sequence_length"],
                "run_folder": "run",
            },
            "deepspeed": {
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": steps,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
                "zero_optimization": zero,
            },
        }
    )
    return changed(config, others)


def twenty_b(*, pinned: bool = False) -> RunConfig:
    offload = {"device": "cpu", "pin_memory": pinned}
    return run(TWENTY_B, {"stage": 2, "offload_optimizer": offload}, micro=4, steps=32)


def small(layers: int = 3, stage: int = 0, steps: int = 1, **zero: Any) -> RunConfig:
    return run({"preset": "gpt2", "layers": layers} | SMALL, {"stage": stage, **zero}, steps=steps)


def cluster(gpu_gib: float, gpus: int = RANKS) -> Machine:
    return Machine(gpus=gpus, gpu_memory=int(gpu_gib * GIB), host_memory=2**40)


def at(timeline: tuple[Sample, ...], moment: str) -> Sample:
    """The last of its name."""
    return next(sample for sample in reversed(timeline) if sample.moment == moment)


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def test_20b_without_pinning_by_hand() -> None:
    planned = plan(twenty_b(), cluster(80))
    gpu, host = (place.peak.by_category for place in (planned.gpu, planned.host))
    assert gpu["parameters"] == pytest.approx(2 * COUNT, rel=1e-6)
    assert host["optimizer_states"] == pytest.approx(8 * COUNT, rel=1e-6)
    assert host["master_weights"] == pytest.approx(4 * COUNT, rel=1e-6)
    # The flat gradient in float32 (OffloadedStates.initialise), and as micro-batches are added up
    # on the host, each parameter of which the rank owns any part, whole and in bf16 (_take). The
    # first rank owns an eighth of each group: of the matrices the embedding and 5 blocks, the last
    # in part; of the vectors 5 blocks and, in order, 6.75 H of the sixth, so the first 7 H.
    own = V * H + 5 * MATRICES + 5 * VECTORS + 7 * H
    assert 4 * MATRICES < (LAYERS * MATRICES + 2 * V * H) / RANKS - V * H < 5 * MATRICES
    assert host["gradients"] == pytest.approx(4 * COUNT + RANKS * 2 * own, rel=1e-6)
    # The shares in bf16, to send, and room for the largest gradient (initialise); for saves in the
    # background a copy of master weights and states, 4 and 8 bytes, and of one rank's parameters.
    sent, copied = 2 * COUNT + RANKS * 2 * V * H, (4 + 8 + 2) * COUNT
    assert host["buffers"] == pytest.approx(sent + copied, rel=1e-6)
    alone = plan(changed(twenty_b(), {"training.save_in_background": False}), cluster(80))
    assert alone.host.peak.by_category["buffers"] == pytest.approx(sent, rel=1e-6)


def test_20b_with_pinning_by_hand() -> None:
    """Each rank's tensors take the next power of two."""
    host = plan(twenty_b(pinned=True), cluster(80)).host.peak.by_category
    shares = [
        (LAYERS * MATRICES + 2 * V * H) // RANKS,
        (LAYERS * VECTORS + 2 * H) // RANKS,
    ]
    assert [power_of_two(4 * share) for share in shares] == [2**34, 2**21]
    master = RANKS * (2**34 + 2**21)
    assert host["master_weights"] == master
    # As above, parameter by parameter: embedding; 3, 1, 4 and 4 H x H; norms and biases.
    squares = [3 * H * H, H * H, 4 * H * H, 4 * H * H]
    vectors = [H, H, 3 * H, H, H, H, 4 * H, H]
    owned = [V * H, *(5 * squares), *(5 * vectors), *vectors[:5]]
    sums = sum(power_of_two(2 * size) for size in owned)
    assert host["gradients"] == master + RANKS * sums
    assert host["optimizer_states"] == pytest.approx(8 * COUNT, rel=1e-6)  # never pinned


def test_20b_recomputes_no_more_than_it_must() -> None:
    found = fit(Planner(twenty_b(), cluster(96)))
    kept = found.plan.policies.count("none")
    assert found.plan.fits
    assert 0 < kept < LAYERS
    assert found.next_best is not None
    assert found.next_best.step.total > found.plan.step.total
    # One block more without recomputation is too much.
    one_more = ("selective",) * (LAYERS - kept - 1) + ("none",) * (kept + 1)
    assert set(found.plan.policies) == {"selective", "none"}
    assert not Planner(twenty_b(), cluster(96)).plan(one_more).fits


def test_20b_on_one_small_gpu() -> None:
    """Its weights alone are 38.3 GiB: nothing helps but to keep them on the host."""
    config, machine = twenty_b(), cluster(24, gpus=1)
    planned = fit(Planner(config, machine)).plan
    assert not planned.fits
    assert planned.gpu.shortfall == planned.gpu.peak.total - 24 * GIB > 2 * COUNT - 24 * GIB
    found = cures(config, machine, planned)
    fitting = [cure for cure in found if cure.plan.fits]
    assert [cure.changes["deepspeed.zero_optimization.stage"] for cure in fitting] == [3]
    assert "deepspeed.zero_optimization.offload_param" in fitting[0].changes
    assert found[0] is fitting[0]


@pytest.mark.parametrize(
    ("config", "machine"),
    [
        (twenty_b(), cluster(0)),
        (small(6), Machine(kind="CPU")),
        (small(6, 2, 2), Machine(gpus=2)),
    ],
    ids=["20B", "small on CPU", "small on GPU"],
)
def test_more_memory_is_never_worse(config: RunConfig, machine: Machine) -> None:
    none_left = Planner(config, machine._replace(gpu_memory=1))  # weights are flattened on the host
    names = candidates(none_left)
    peaks = [none_left.plan(uniform(none_left, policy)).gpu.peak.total for policy in names]
    low, high = min(peaks), max(peaks)
    seconds, fitting = [], []
    for share in (-0.1, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0):
        budget = int(low + share * (high - low))
        planner = Planner(config, machine._replace(gpu_memory=budget))
        chosen = fit(planner, alternatives=False).plan
        seconds.append(chosen.step.total if chosen.fits else float("inf"))
        fitting.append([planner.plan(uniform(planner, policy)).fits for policy in names])
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == float("inf") > seconds[1]
    assert len(set(seconds)) > 4  # the budgets do lead to different choices
    for column in zip(*fitting, strict=True):
        assert list(column) == sorted(column)
        assert {*column} == {False, True}


# Parameters that ZeRO 3 does take apart at this size, fetched a few at a time.
GATHERED = {"stage3_param_persistence_threshold": 10, "stage3_prefetch_bucket_size": 30_000}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES = [
    *(("CPU", 3, stage, steps, {}) for stage in (0, 2, 3) for steps in (1, 2)),
    *(("CPU", 4, stage, 2, {}) for stage in (0, 2)),
    *(("H100", 3, stage, steps, {}) for stage, steps in ((0, 2), (2, 1), (3, 2))),
    ("H100", 3, 3, 1, GATHERED),
    ("H100", 3, 2, 2, OFFLOAD),
    ("H100", 4, 0, 1, {}),
]


@pytest.mark.parametrize(("kind", "layers", "stage", "steps", "zero"), CASES)
def test_fit_equals_brute_force(
    kind: str, layers: int, stage: int, steps: int, zero: dict[str, Any]
) -> None:
    config, machine = small(layers, stage, steps, **zero), Machine(gpus=2, kind=kind)
    plans = every_plan(Planner(config, machine))
    peaks = sorted(each.gpu.peak.total for each in plans)
    between = [peaks[int(share * (len(peaks) - 1))] for share in (0, 0.1, 0.3, 0.5, 0.7, 0.9)]
    outcomes = []
    for budget in (peaks[0] - 1, *between):
        planner = Planner(config, machine._replace(gpu_memory=budget))
        if kind == "H100" and stage == 2:  # what is flattened on the host depends on the budget
            plans = every_plan(planner)
        fitting = [each.step.total for each in plans if each.gpu.peak.total <= budget]
        chosen = fit(planner).plan
        assert chosen.fits == bool(fitting)
        if fitting:
            assert chosen.step.total == pytest.approx(min(fitting), rel=1e-12)
        outcomes.append(min(fitting, default=None))
    assert len(set(outcomes)) > 4


def every_plan(planner: Planner) -> list[Plan]:
    layers = planner.config.model.layers
    return [planner.plan(each) for each in product(candidates(planner), repeat=layers)]


def test_fit_heeds_the_host() -> None:
    """Offloaded activations that the host has no room for are not chosen."""
    config, machine = small(4, 2), Machine(gpus=2)
    free = Planner(config, machine)
    plans = {p: free.plan(uniform(free, p)) for p in ("full", "offload")}
    less = plans["offload"].gpu.peak.total
    assert less < plans["full"].gpu.peak.total
    chosen = fit(Planner(config, machine._replace(gpu_memory=less))).plan
    assert chosen.fits
    assert "offload" in chosen.policies
    host = free.plan(uniform(free, "none")).host.peak.total
    assert not fit(Planner(config, machine._replace(gpu_memory=less, host_memory=host))).plan.fits
    assert fit(Planner(config, machine._replace(host_memory=host - 1))).plan.host.shortfall == 1


@pytest.mark.parametrize(
    ("stage", "steps", "policy", "zero"),
    [(3, 1, "full", {}), (2, 3, "none", {"contiguous_gradients": False}), (0, 1, "none", {})],
)
def test_a_step_leaves_nothing_behind(
    stage: int, steps: int, policy: Policy, zero: dict[str, Any]
) -> None:
    """In units of CUDA's allocator, where a sum is not released by its parts' sizes."""
    planner = Planner(small(3, stage, steps, **zero), Machine(gpus=2))
    ledger = planner.replay(uniform(planner, policy))
    ends = [n for n, s in enumerate(ledger.timeline["gpu"]) if s.moment == "optimizer step"]
    assert ledger.starts["gpu"][ends[0] + 1] == ledger.total() > 0


def test_offload_param_gets_no_credit_below_stage_3() -> None:
    plans = {
        (stage, key): plan(small(3, stage, **({key: {"device": "cpu"}} if key else {})), Machine(2))
        for stage, key in product((2, 3), ("", "offload_param"))
    }
    assert plans[2, ""].gpu == plans[2, "offload_param"].gpu
    ignored = [line for line in plans[2, "offload_param"].assumptions if "offload_param" in line]
    assert ignored == ["offload_param saves nothing below ZeRO stage 3: DeepSpeed ignores it"]
    assert not any("offload_param" in line for line in plans[2, ""].assumptions)
    held = [plans[3, key].gpu.peak.by_category["parameters"] for key in ("", "offload_param")]
    assert held[1] < held[0]
    # The weights then pass the link to the host in each forward and backward.
    times = [plans[3, key].step.communication for key in ("", "offload_param")]
    assert times[1] > times[0]


def test_reduction_buckets_larger_than_the_model() -> None:
    given, machine = small(3, 2, reduce_bucket_size=500_000_000), Machine(gpus=2)
    buffers = at(plan(given, machine).gpu.timeline, "block 0 backward").by_category["buffers"]
    batch = 2 * 2 * 128 * 8  # tokens and targets
    assert buffers == 500_000_000 * 2 + batch
    capped = small(3, 2)
    count = capped.model.parameter_count()
    assert Planner(capped, machine).section["zero_optimization"]["reduce_bucket_size"] == count
    buffers = at(plan(capped, machine).gpu.timeline, "block 0 backward").by_category["buffers"]
    assert buffers == pytest.approx(2 * count + batch, abs=512)

    def warnings(config: RunConfig) -> list[str]:
        return warnings_of(config, Planner(config, machine).section, Hardware(2, "cuda", True))

    assert [line for line in warnings(given) if f"model has {count:,} parameters" in line]
    assert not [line for line in warnings(capped) if "reduce_bucket_size" in line]


def test_the_loss_is_the_peak_of_a_large_vocabulary() -> None:
    model = {"preset": "llama", "layers": 4, "width": 1024, "heads": 16}
    sizes = {"vocabulary_size": 128_000, "max_sequence_length": 4096}
    full, auto = (
        plan(run(model | sizes, {"stage": 2}, 8, **{"training.loss": loss}), cluster(80)).gpu.peak
        for loss in ("full", "auto")
    )
    assert full.moment.startswith("loss")
    assert max(full.by_category, key=full.by_category.__getitem__) == "loss"
    # At least logits in bf16, and their softmax and its gradient in float32.
    assert full.by_category["loss"] > 8 * 4096 * 128_000 * (2 + 4 + 4)
    assert auto.total < full.total - 8 * 4096 * 128_000 * (4 + 4)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), ("1tib", 2**40), ("512", 512),
        ("1.5KiB", 1536), (" 3 MB ", 3_000_000), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 gigs", "-1GiB", "1e9", "1,5GiB", "80GiB free"])
def test_mistyped_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 80GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 * 2**10, "1.50 MiB"),
        (2**30, "1.00 GiB"), (5000 * 2**30, "5000.00 GiB"), (-2048, "-2.00 KiB"),
    ],
)  # fmt: skip
def test_sizes_are_shown(size: int, text: str) -> None:
    assert show_bytes(size) == text


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Of a run that needs 1.2 GiB of a GPU, most of it an allowance."""
    file = tmp_path / "run.json"
    file.write_text(small(4, 2).model_dump_json())
    return str(file)


def test_command(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--config", path, "--gpus", "8"]
    assert main([*there, "--gpu-memory", "80GiB"]) == 0
    assert "\nfits\n" in capsys.readouterr().out
    image = tmp_path / "plan.png"
    assert main([*there, "--gpu-memory", "1GiB", "--plot", str(image)]) == 3
    shown = capsys.readouterr().out
    assert "does not fit: each GPU lacks" in shown
    assert "what would help:" in shown
    assert image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert main([*there, "--fit", "--search", "micro_batch,zero_stage"]) == 0


def test_command_says_what_is_wrong(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--config", path, "--gpu-memory", "80gigs"], "expected a size such as 80GiB"),
        (["--config", "missing.json"], "missing.json"),
        (["--config", path, "--search", "microbatch"], "'microbatch': expected some of"),
        (["--config", path, "--gpus", "none"], "'none': expected a number"),
    ):
        try:
            code = main(arguments)
        except SystemExit as stop:  # argparse's way, after its usage
            code = int(str(stop.code))
        assert code == 2
        shown = capsys.readouterr()
        (line,) = [line for line in shown.err.splitlines() if "error: " in line]
        assert words in line
        assert not shown.out


CATEGORIES = {
    "parameters", "master_weights", "gradients", "optimizer_states", "buffers", "activations",
    "transient", "loss", "allowance",
}  # fmt: skip


def test_json(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", path, "--gpus", "2", "--gpu-memory", "2GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    gpu, host = found["gpu"], found["host"]
    assert found.keys() == {
        "fits", "gpu", "host", "policies", "step_seconds_estimate", "assumptions"
    }  # fmt: skip
    assert gpu.keys() == {"peak_bytes", "limit_bytes", "by_category", "peak_moment"}
    assert host.keys() == {"peak_bytes", "limit_bytes", "by_category"}
    for place in (gpu, host):
        assert place["by_category"].keys() == CATEGORIES
        assert sum(place["by_category"].values()) == place["peak_bytes"]
    assert (gpu["limit_bytes"], host["limit_bytes"]) == (2 * GIB, None)
    assert found["policies"] == ["none"] * 4
    assert found["fits"] is True


def test_command_runs_without_deepspeed(path: str, command: Command) -> None:
    code = (
        "import sys\nfrom memory.plan import main\n"
        f"code = main(['--config', {path!r}, '--gpus', '8', '--gpu-memory', '1GiB', '--fit'])\n"
        "sys.exit(code if 'deepspeed' not in sys.modules else 'deepspeed is imported')"
    )
    done = command.python("-c", code)
    assert done.returncode == 3, done.stderr


def test_command_as_a_module(path: str, command: Command) -> None:
    done = command.python("-m", "memory.plan", "--config", path, "--gpu-memory", "1 gig")
    assert done.returncode == 2
    assert done.stderr.startswith("error: '1 gig': expected a size")
    assert len(done.stderr.splitlines()) == 1


def test_check_plans_for_other_hardware(path: str, command: Command) -> None:
    arguments = ("train.py", "--config", path, "--check", "--gpus", "8", "--gpu-memory", "1GiB")
    done = command.python(*arguments)
    assert done.returncode == 3, done.stderr
    assert "does not fit: each GPU lacks" in done.stdout


def test_policies_survive_the_config() -> None:
    config = small(6)
    policies: tuple[Policy, ...] = ("full", "none", "full", "selective", "selective", "none")
    named = changed(config, {"activation_checkpointing.policies": as_names(policies)})
    assert plan(named, Machine()).policies == policies
