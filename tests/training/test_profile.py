"""What a profile says of a block is that block's, equals the plan, and changes no training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import training.profile as command_module
from configs.schema import RunConfig
from memory.activations import Shape, trace
from memory.machine import Machine
from memory.planner import Planner
from memory.policies import Policy
from memory.recompute import apply_policies
from model.config import ModelConfig
from model.gpt import GPT, MLP, build
from training.checkpoint import claim_run_folder
from training.engine import Ranks
from training.profile import (
    CudaAllocator,
    Mark,
    Step,
    copies,
    main,
    measure_memory,
    measure_seconds,
    observed,
    parse,
)
from training.profile_report import (
    UPDATE,
    Phase,
    Profile,
    make_profile,
    phases,
    planned_phases,
    show,
    use_of,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
MICRO_BATCH, TIME, WIDTH, HEADS, LAYERS = 8, 256, 256, 4, 3
HIDDEN = 4 * MICRO_BATCH * TIME * WIDTH
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"preset": "gpt2"},
    "llama": {"preset": "llama", "kv_heads": 2},
}


def make(architecture: str = "gpt2", **changes: Any) -> GPT:
    sizes = {
        "layers": LAYERS, "width": WIDTH, "heads": HEADS, "vocabulary_size": 96,
        "max_sequence_length": TIME,
    }  # fmt: skip
    config = ModelConfig.model_validate({**MODELS[architecture], **sizes, **changes})
    return build(config, seed=1)


def step_of(model: GPT) -> Step:
    generator = torch.Generator().manual_seed(3)
    shape = MICRO_BATCH, min(TIME, model.config.max_sequence_length)
    inputs, targets = (torch.randint(96, shape, generator=generator) for _ in range(2))

    def step(mark: Mark) -> None:
        with observed(model, mark):
            model(*next(copies((inputs, targets), mark))).backward()
        mark(UPDATE)
        model.zero_grad()
        mark("end")

    return step


def measure(model: GPT, policies: Sequence[Policy]) -> list[Phase]:
    apply_policies(model, policies)
    return phases(measure_memory(step_of(model), CPU, None))


def saved(found: list[Phase]) -> list[int]:
    blocks = sum(phase.name.startswith("block") for phase in found) // 2
    return [use_of(f"block {number}", found, HIDDEN).saved for number in range(blocks)]


@pytest.mark.parametrize("architecture", MODELS)
def test_saved_bytes_equal_the_plan_block_by_block(architecture: str) -> None:
    model = make(architecture)
    shape = Shape(MICRO_BATCH, TIME, torch.float32, "cpu")
    policies: tuple[Policy, ...] = ("selective", "none", "full")
    tapes = trace(model.config, shape, policies=policies).blocks
    expected = [tapes[policy].kept for policy in policies]
    assert saved(measure(model, policies)) == pytest.approx(expected, rel=0.005)
    assert len(set(expected)) == 3


def test_saved_bytes_equal_the_formula() -> None:
    """gpt2, float32, no dropout: 16, 10, 1 hidden states (tests/memory/test_checkpointing.py).

    Per token: attention's statistic of each head, and mean and deviation of two norms, which
    selective computes again. Checkpoints keep random states as well.
    """
    random_state = 2 * torch.get_rng_state().nbytes
    tokens = MICRO_BATCH * TIME
    none, selective, full = saved(measure(make(), ("none", "selective", "full")))
    assert none == 16 * HIDDEN + 4 * tokens * (HEADS + 4)
    assert selective == pytest.approx(10 * HIDDEN + 4 * tokens * HEADS, abs=random_state)
    assert full == pytest.approx(HIDDEN, abs=random_state)


def with_a_wide_block(index: int = 1) -> GPT:
    """A fork in which one block has an MLP four times as wide as the others'."""
    model = make()
    wide = model.config.model_copy(update={"mlp_width": 4 * model.config.mlp_width})
    model.blocks[index].mlp = MLP(wide)
    return model


def profile_of(model: GPT, policies: tuple[Policy, ...], planned: Sequence[Phase]) -> Profile:
    found = measure(model, policies)
    seconds = dict.fromkeys([phase.name for phase in found], 1.0)
    return make_profile(policies, found, planned, HIDDEN, seconds)


def test_the_block_that_uses_most_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alike = measure(make(), ("none",) * LAYERS)
    profile = profile_of(with_a_wide_block(), ("none", "none", "none"), alike)
    for column in ("saved", "forward_peak", "backward_peak"):
        assert [row.name for row in profile.most(column)] == ["block 1"]
    _, wide, narrow = (row.measured.saved for row in profile.blocks)
    assert wide - narrow == 2 * 12 * HIDDEN  # "up" and its activation, 16 widths for 4
    show(profile)
    printed = capsys.readouterr().out
    starred = [line.split("  ")[0] for line in printed.splitlines() if "MiB*" in line]
    assert starred == ["block 1"]
    assert "* most saved: block 1, 80.06 MiB; a block's median is 32.06 MiB" in printed

    checkpointed = profile_of(with_a_wide_block(), ("none", "full", "none"), alike)
    assert [row.name for row in checkpointed.most("saved")] == ["block 0", "block 2"]
    assert checkpointed.blocks[1].measured.saved < 1.01 * HIDDEN


@pytest.mark.parametrize(("place", "saves"), [(0, True), (LAYERS - 1, False)])
def test_checkpointing_the_wide_block_helps_the_blocks_after_it(place: int, saves: bool) -> None:
    """At its own backward all of it is there again, and only the blocks before it are with it."""

    def peak(policy: Policy) -> int:
        policies = tuple(policy if number == place else "none" for number in range(LAYERS))
        return max(phase.peak for phase in measure(with_a_wide_block(place), policies))

    # All three blocks together keep 40 + 16 + 16 hidden states. Alone, at its own backward, the
    # wide one needs 40, 17 for gradients in its MLP, and the gradients of all weights are 8.
    assert peak("none") > 72 * HIDDEN
    assert peak("full") < 65 * HIDDEN if saves else peak("full") > 72 * HIDDEN


def test_where_blocks_are_alike_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    alike = measure(make(), ("none",) * LAYERS)
    show(profile_of(make(), ("none",) * LAYERS, alike))
    printed = capsys.readouterr().out
    assert "all blocks use the same" in printed
    assert "*" not in printed


def test_moments_of_a_step_in_their_order() -> None:
    model = make(layers=2, width=16)
    apply_policies(model, ("full", "none"))
    names: list[str] = []
    step_of(model)(names.append)
    assert names == [
        "embedding forward",
        "block 0 forward",
        "block 1 forward",
        "loss forward",
        "loss backward",
        "block 1 backward",
        "block 0 backward",
        "block 0 recomputation",
        "block 0 backward",
        "embedding backward",
        UPDATE,
        "end",
    ]


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_observing_changes_no_bit_and_leaves_nothing(policy: Policy) -> None:
    def gradients(watch: bool) -> list[torch.Tensor]:
        model = make(layers=2, width=16, dropout=0.1)
        apply_policies(model, (policy, "none"))
        installed, names = model.run_block, list(model.state_dict())
        tokens = torch.arange(32).view(2, 16)
        torch.manual_seed(5)
        if watch:
            with observed(model, lambda _: None):
                assert model.run_block is not installed
                model(tokens, tokens).backward()
        else:
            model(tokens, tokens).backward()
        assert model.run_block is installed
        assert not model._forward_hooks
        assert not model.final_norm._forward_pre_hooks
        assert list(model.state_dict()) == names
        return [p.grad for p in model.parameters() if p.grad is not None]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)


def test_peaks_count_from_where_their_moment_begins() -> None:
    found = [
        Phase("block 0 forward", 10, 90, 60),
        Phase("block 0 backward", 60, 100, 20),
        Phase("block 0 forward", 20, 95, 70),
        Phase("block 0 backward", 70, 85, 20),
    ]
    use = use_of("block 0", found, HIDDEN)
    assert (use.saved, use.forward_peak, use.backward_peak) == (50, 80, 40)


def test_the_plan_is_of_the_second_step(run_config: dict[str, Any]) -> None:
    planner = Planner(RunConfig.model_validate(run_config), Machine(1, kind="CPU"))
    policies: tuple[Policy, ...] = ("none", "full")
    found = planned_phases(planner.replay(policies))
    names = [phase.name for phase in found]
    assert names[0] == "embedding forward"
    assert names.count(UPDATE) == 1
    traced = planner.traced
    for number, policy in enumerate(policies):
        use = use_of(f"block {number}", found, traced.hidden)
        assert use.saved == traced.blocks[policy].kept


def test_times_are_medians_of_what_a_step_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    durations = iter([100.0, 2.0, 9.0, 3.0])  # the first step is a warm-up

    def step(mark: Mark) -> None:
        nonlocal clock
        lasts = next(durations)
        for name in ("forward", "backward", "forward", "end"):
            mark(name)
            clock += lasts

    monkeypatch.setattr(command_module.time, "perf_counter", lambda: clock)
    assert measure_seconds(step, CPU, 3) == {"forward": 6.0, "backward": 3.0}


def test_moments_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic only: a made-up allocator in the place of torch's."""
    held = peak = 0

    def change(size: int) -> None:
        nonlocal held, peak
        held += size
        peak = max(peak, held)

    def reset(device: torch.device) -> None:
        nonlocal peak
        peak = held

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    allocator = CudaAllocator(torch.device("cuda"))
    change(1000)
    for name, sizes in {"a": (100, 50, -120), "b": (5, -5), "end": ()}.items():
        allocator(name)
        for size in sizes:
            change(size)
    found = [(m.name, m.start, m.peak, m.end) for m in allocator.moments]
    assert found == [("a", 1000, 1150, 1030), ("b", 1030, 1035, 1030), ("end", 1030, 1030, 1030)]


def test_a_run_may_start_where_a_profile_is(
    altered: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = RunConfig.model_validate(altered({"training.run_folder": str(tmp_path / "new")}))
    (tmp_path / "new" / "profile").mkdir(parents=True)
    claim_run_folder(config)
    (tmp_path / "new" / "profiles").mkdir()
    with pytest.raises(ValueError, match="not a run folder"):
        claim_run_folder(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "model.layer=3"], "error: model.layer: unknown key; did you mean 'layers'?\n"),
        (
            ["--set", "activation_checkpointing.policies.full=[7]"],
            "error: activation_checkpointing.policies.full: block 7 does not exist; blocks are 0 "
            "to 5\n",
        ),
        (["--output", "README.md/here"], "error: [Errno 20] Not a directory: 'README.md/here'\n"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command_module, "read_ranks", lambda _: Ranks(0, 0, 1, 1, CPU))
    assert main(["--config", "configs/quickstart.json", *arguments]) == 2
    assert capsys.readouterr().err == message


def test_steps_are_a_positive_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--config", "c.json", "--steps", "0"])
    assert stopped.value.code == 2
    assert "--steps: '0': expected a number of at least 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command(command: Any, tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "run"
    policies = {"full": [0], "selective": [1]}
    settings = {
        "model.layers": 3, "model.width": 64, "model.heads": 2, "training.sequence_length": 128,
        "training.run_folder": str(folder), "data.validation": "no/corpus/is/needed",
        "activation_checkpointing.policies": json.dumps(policies),
    }  # fmt: skip
    overrides = [f"--set={key}={value}" for key, value in settings.items()]
    arguments = ["-m", "training.profile", "--config", "configs/quickstart.json", "--steps", "2"]
    env = {"OMP_NUM_THREADS": "1"}
    done = command.python(*arguments, *overrides, ranks=ranks, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [entry.name for entry in folder.iterdir()] == ["profile"]
    files = {entry.name: entry for entry in (folder / "profile").iterdir()}
    assert files.keys() == {"trace.json", "blocks.png", "profile.json"}
    assert files["blocks.png"].read_bytes()[1:4] == b"PNG"
    events = json.loads(files["trace.json"].read_text())["traceEvents"]
    assert "moment: block 0 recomputation" in [event.get("name") for event in events]

    rows = {row["name"]: row for row in json.loads(files["profile.json"].read_text())["rows"]}
    assert list(rows) == ["embedding", "block 0", "block 1", "block 2", "loss"]
    for name, row in rows.items():
        assert sum(line.startswith(name) for line in done.stdout.splitlines()) == 1
        assert (row["seconds"]["recomputation"] > 0) == (name in ("block 0", "block 1"))
        if name.startswith("block"):
            # A checkpoint keeps random states, which the plan leaves out.
            for column, size in row["planned"].items():
                assert row["measured"][column] == pytest.approx(size, rel=0.005, abs=11000)
