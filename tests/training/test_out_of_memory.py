"""Memory that runs out for real, on a CPU with a limit; what is held; and where a rank is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig, changed
from memory.diagnosis import Observation, Report, read_report
from memory.fit import plan
from memory.machine import Machine
from memory.messages import Figures
from memory.planner import Plan
from memory.policies import Policy
from memory.recompute import apply_policies
from model.config import ModelConfig
from model.gpt import GPT, build
from training.engine import Ranks
from training.out_of_memory import Whereabouts, is_out_of_memory, report_out_of_memory

MIB = 2**20
CPU = Machine(kind="CPU")
HALVES = {
    "deepspeed.train_micro_batch_size_per_gpu": 4,
    "deepspeed.gradient_accumulation_steps": 2,
}


@pytest.fixture
def config(run_config: dict[str, Any]) -> RunConfig:
    """Activations are three quarters of what it needs: 192 of 260 MiB."""
    run_config["model"] |= {"layers": 6, "width": 256, "max_sequence_length": 256, "dropout": 0.0}
    run_config["training"] |= {"sequence_length": 256, "loss": "full"}
    run_config["deepspeed"] |= {"gradient_accumulation_steps": 1}
    return RunConfig.model_validate(run_config)


Run = Callable[[RunConfig, int], Report | None]


@pytest.fixture
def run(command: Any, tmp_path: Path) -> Run:
    """Train under a limit of so many bytes; the report, or None where they sufficed."""

    def train(config: RunConfig, allowed: int) -> Report | None:
        path = tmp_path / "config.json"
        path.write_text(config.model_dump_json())
        # Each tensor of 64 KiB or more in pages of its own, which go back at its release: else
        # what glibc's heap keeps in holes counts, too.
        env = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "OMP_NUM_THREADS": "1"}
        worker = str(Path(__file__).with_name("out_of_memory_worker.py"))
        done = command.python(worker, str(path), str(allowed), env=env)
        assert done.returncode in (0, 3), done.stderr[-3000:]
        if done.returncode == 0:
            return None
        written = Path(config.training.run_folder) / "out_of_memory.json"
        report = read_report(json.loads(written.read_text()))
        assert f"out of memory on rank 0: {report.rule.replace('_', ' ')}" in done.stdout
        return report

    return train


def first_beyond(now: Plan, limit: int) -> str:
    return next(sample.moment for sample in now.gpu.timeline if sample.total > limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "share", "rule", "moment", "cure"),
    [
        ({}, 0.9, "capacity", "block 5 forward", HALVES),
        ({"deepspeed.zero_optimization.stage": 2}, 0.9, "capacity", "block 5 forward", HALVES),
        # 2048 tokens x 20,000 words x 4 bytes: 156 MiB of logits, and their gradient.
        (
            {"model.vocabulary_size": 20_000, "model.layers": 2},
            0.9,
            "loss",
            "loss backward",
            {"training.loss": "auto"},
        ),
    ],
    ids=["activations", "activations at ZeRO 2", "logits"],
)
def test_the_first_cure_lets_the_same_run_pass_under_the_same_limit(
    changes: dict[str, Any],
    share: float,
    rule: str,
    moment: str,
    cure: dict[str, Any],
    config: RunConfig,
    run: Run,
) -> None:
    config = changed(config, changes)
    now = plan(config, CPU)
    limit = int(share * now.gpu.peak.total)
    assert first_beyond(now, limit) == moment
    report = run(config, limit)
    assert report is not None
    assert (report.rule, report.observation.moment) == (rule, moment)
    held, planned = report.observation.held, report.planned
    assert held is not None
    assert planned is not None
    count = config.model.parameter_count()
    assert held["parameters"] == planned["parameters"] == 4 * count
    assert held["master_weights"] == planned["master_weights"]
    # What could not be had is in the plan's peak; the interpreter is in what was held.
    requested = report.observation.figures.requested
    assert requested is not None
    assert held["rest"] > planned["rest"] - requested > sum(planned.values()) / 2
    assert report.missing is not None
    assert report.missing >= now.gpu.peak.total - limit
    first = report.cures[0]
    assert (first.changes, first.fits) == (cure, True)
    assert run(changed(config, first.changes), limit) is None


@pytest.mark.slow
def test_an_update_that_has_no_room_for_its_states(config: RunConfig, run: Run) -> None:
    config = changed(config, {"model.layers": 12, "training.sequence_length": 16})
    now = plan(config, CPU)
    limit = int(0.8 * now.gpu.peak.total)
    report = run(config, limit)
    assert report is not None
    assert (report.rule, report.observation.moment) == ("optimizer_step", "optimizer step")
    held, planned = report.observation.held, report.planned
    assert held is not None
    assert planned is not None
    assert held["gradients"] == planned["gradients"] == held["parameters"]
    # Weights, gradients and two moments are nearly everything: at 80 % most states are made.
    assert planned["optimizer_states"] == 2 * held["parameters"]
    assert planned["optimizer_states"] / 2 < held["optimizer_states"] < planned["optimizer_states"]
    # What was had: all that could be measured.
    measured = sum(size for category, size in held.items() if category != "rest")
    assert report.missing == now.gpu.peak.total - measured
    assert not any(cure.fits for cure in report.cures), "one CPU has nothing to divide them over"


@pytest.mark.slow
def test_a_model_that_cannot_be_built(config: RunConfig, run: Run) -> None:
    report = run(config, 10 * MIB)  # of 18.6 MiB of weights
    assert report is not None
    assert (report.rule, report.observation.moment) == ("capacity", "initialisation")
    assert report.observation.held is not None
    assert report.observation.held.keys() == {"rest"}, "there is no engine yet"
    assert report.planned is not None, "the planner has room where the run had not"
    assert report.planned["parameters"] == 4 * config.model.parameter_count()


BF16 = {"deepspeed.bf16": {"enabled": True}}
WIDE = {"deepspeed.data_types": {"grad_accum_dtype": "fp32"}}


def stage(number: int, **others: Any) -> dict[str, Any]:
    # Else ZeRO 3 leaves parameters as small as these gathered.
    persistent = {"deepspeed.zero_optimization.stage3_param_persistence_threshold": 0}
    return {"deepspeed.zero_optimization.stage": number, **others} | (
        persistent if number == 3 else {}
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_held_by_category(
    ranks: int, run_config: dict[str, Any], command: Any, tmp_path: Path
) -> None:
    """Bytes a parameter: weights, master weights, states after a step; gradients after backward.

    N ranks share what ZeRO divides.
    """
    run_config["model"] |= {"width": 64, "vocabulary_size": 64}  # an even number of parameters
    run_config["deepspeed"] |= {"gradient_accumulation_steps": 1}
    config = RunConfig.model_validate(run_config)
    share = 1 / ranks
    expected: dict[str, tuple[dict[str, Any], tuple[float, float, float, float]]] = {
        "float32": ({}, (4, 0, 8, 4)),
        "float32 ZeRO 2": (stage(2), (4, 4 * share, 8 * share, 4 * share)),
        "float32 ZeRO 3": (stage(3), (4 * share, 4 * share, 8 * share, 4 * share)),
        "bf16": (BF16, (2, 4, 8, 2)),
        "bf16 ZeRO 2": (stage(2, **BF16), (2, 4 * share, 8 * share, 2 * share)),
        "bf16 ZeRO 3": (stage(3, **BF16), (2 * share, 4 * share, 8 * share, 2 * share)),
        # Gradients of this micro-batch in bf16, and their sum in float32.
        "bf16 ZeRO 1": (stage(1, **BF16, **WIDE), (2, 4 * share, 8 * share, 6)),
    }
    given = {name: changed(config, changes).model_dump() for name, (changes, _) in expected.items()}
    (tmp_path / "configs.json").write_text(json.dumps(given))
    worker = str(Path(__file__).with_name("held_worker.py"))
    arguments = str(tmp_path / "configs.json"), str(tmp_path / "held.json")
    done = command.python(worker, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "held.json").read_text())
    count = config.model.parameter_count()
    for name, (_, per_parameter) in expected.items():
        held = found[name]
        measured = [held["step"][c] for c in ("parameters", "master_weights", "optimizer_states")]
        # Small parameters' shares are padded, and Adam's step counts are states, too.
        assert [size / count for size in measured] == pytest.approx(per_parameter[:3], rel=0.01), (
            name
        )
        # ZeRO 2 keeps the whole gradient of a matrix of which a share is this rank's.
        cut = 4 * (4 * 64 * 64) / count if ranks > 1 and name.endswith("ZeRO 2") else 0.0
        gradients = held["backward"]["gradients"] / count
        assert 0.99 * per_parameter[3] < gradients < 1.01 * per_parameter[3] + cut, name


class Unplanned:
    """What a report needs of a run, whose planning fails."""

    def __init__(self, config: RunConfig, error: BaseException) -> None:
        self.config, self.error = config, error
        self.ranks = Ranks(1, 1, 2, 2, torch.device("cpu"))

    def plan(self) -> Plan:
        raise self.error


def test_without_room_for_the_planner_cures_are_general(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Observation("MemoryError", "loss forward", 1, "cpu", Figures("host"))
    report = report_out_of_memory(Unplanned(config, MemoryError()), seen)
    assert (report.rule, report.planned) == ("loss", None)
    assert "in chunks" in report.cures[0].advice
    assert "out of memory on rank 1: loss" in capsys.readouterr().out
    written = Path(config.training.run_folder) / "out_of_memory_rank1.json"
    assert read_report(json.loads(written.read_text())) == report
    with pytest.raises(RuntimeError, match="a mistake"):
        report_out_of_memory(Unplanned(config, RuntimeError("a mistake of the planner")), seen)
    written.unlink()
    with pytest.raises(SystemExit):  # as an abort by Python would
        report_out_of_memory(Unplanned(config, SystemExit()), seen)
    assert read_report(json.loads(written.read_text())).rule == "loss"


def test_the_errors_that_mean_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("MemoryError"))


class Recording(Whereabouts):
    """Keeps every moment."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "moment":
            self.__dict__.setdefault("moments", []).append(value)
        super().__setattr__(name, value)


class Engine:
    """What Whereabouts needs of one."""

    def __init__(self, module: GPT) -> None:
        self.module = module
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


PASS = [
    "embedding forward", "block 0 forward", "block 1 forward", "loss forward",
    "loss backward", "block 1 backward", "block 0 backward", "embedding backward",
]  # fmt: skip


@pytest.mark.parametrize("policies", [("none", "none"), ("full", "none"), ("selective", "full")])
def test_where_a_rank_is(policies: tuple[Policy, ...]) -> None:
    sizes = {"layers": 2, "width": 16, "heads": 2, "vocabulary_size": 8, "max_sequence_length": 8}
    model = build(ModelConfig.model_validate({"preset": "gpt2", "dropout": 0.1} | sizes), seed=0)
    tokens = torch.randint(8, (2, 8))
    gradients = []
    engine, whereabouts = Engine(model), Recording()
    for watched in (False, True, True):
        apply_policies(model, policies)
        if watched:
            whereabouts.watch(engine)
            whereabouts.watch(engine)  # a second time, without new policies, changes nothing
        model.zero_grad()
        torch.manual_seed(1)
        model(tokens, tokens).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        engine.step()
    assert whereabouts.moments == [
        "initialisation",
        *PASS, "optimizer step", "between steps",
        *PASS, "optimizer step", "between steps",
    ]  # fmt: skip
    assert engine.steps == 3
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))
    whereabouts.moment = "evaluation"
    with torch.no_grad():
        model(tokens, tokens)
    assert whereabouts.moment == "evaluation"
