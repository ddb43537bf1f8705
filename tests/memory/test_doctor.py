"""Messages and logs of memory that ran out, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig, changed
from memory.diagnosis import Observation, Report, read_report, rule_of
from memory.doctor import diagnose, main
from memory.fit import plan
from memory.machine import Machine
from memory.messages import Cgroup, Figures, find_message, read_cgroup, read_message

GIB, MIB = 2**30, 2**20


def gib(number: float) -> int:
    return int(number * GIB)


OLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; 70.10 GiB "
    "already allocated; 1.20 GiB free; 74.00 GiB reserved in total by PyTorch) If reserved memory "
    "is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
NEW = (
    "CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.20 GiB is free. {processes}Of the allocated memory {allocated} is allocated by "
    "PyTorch, and {unused} is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management"
)
OWN = "Including non-PyTorch memory, this process has 77.90 GiB memory in use. "
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)


def new(requested: str, allocated: str, unused: str, processes: str = OWN) -> str:
    fields = {"allocated": allocated, "unused": unused, "processes": processes}
    return NEW.format(requested=requested, **fields)


PLAIN = new("2.00 GiB", "70.10 GiB", "3.90 GiB")
# 9 GiB in pieces: more than the 2 GiB that were asked for and than a tenth of 79.15 GiB.
FRAGMENTED = new("2.00 GiB", "65.00 GiB", "9.00 GiB")


def traceback(*frames: tuple[str, str, str], error: str, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):"]
    for file, function, code in frames:
        lines += [f'  File "{file}", line 7, in {function}', f"    {code}"]
    return "\n".join(prefix + line for line in [*lines, error])


MAIN = ("train.py", "<module>", "main()")
LOSS = traceback(
    MAIN,
    ("/site-packages/torch/nn/modules/module.py", "_call_impl", "return forward_call(*args)"),
    ("model.py", "forward", "loss = F.cross_entropy(logits.view(-1, n), targets.view(-1))"),
    ("/site-packages/torch/nn/functional.py", "cross_entropy", "return torch._C._nn.cross(...)"),
    error=f"torch.OutOfMemoryError: {PLAIN}",
)
STEP = traceback(
    MAIN,
    ("/site-packages/deepspeed/runtime/engine.py", "step", "self._take_model_step(lr_kwargs)"),
    ("/site-packages/torch/optim/adamw.py", "_init_group", "torch.zeros_like(p)"),
    error=f"torch.cuda.OutOfMemoryError: {OLD}",
)
SAVE = traceback(
    MAIN,
    ("/site-packages/deepspeed/runtime/engine.py", "save_checkpoint", "self._save(...)"),
    ("/site-packages/torch/serialization.py", "save", "_save(obj, opened_zipfile)"),
    error=f"torch.OutOfMemoryError: {PLAIN}",
)
CAPACITY = traceback(
    MAIN,
    ("/site-packages/torch/autograd/graph.py", "_engine_run_backward", "return run(...)"),
    error=f"torch.OutOfMemoryError: {PLAIN}",
)


@pytest.mark.parametrize(
    ("log", "rule", "moment"),
    [
        (traceback(MAIN, error=f"RuntimeError: {FRAGMENTED}"), "fragmentation", ""),
        (CAPACITY, "capacity", "backward"),
        (LOSS, "loss", "loss forward"),
        (STEP, "optimizer_step", "optimizer step"),
        (SAVE, "save", "checkpoint save"),
        (traceback(MAIN, error=f"RuntimeError: {HOST}"), "host", ""),
        (traceback(MAIN, error="MemoryError"), "host", ""),
        ("[launch.py:351:main] Process 17 exits with return code = -9", "host_killed", ""),
        ("  exitcode  : -9 (pid: 17)\n  error_file: <N/A>", "host_killed", ""),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.", "host_killed", ""),
        ("./run.sh: line 3: 17 Killed                  python train.py", "host_killed", ""),
        (
            "RuntimeError: DataLoader worker (pid 17) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory.",
            "shared_memory",
            "",
        ),
    ],
)
def test_logs_and_their_rules(log: str, rule: str, moment: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"step 1\n{log}\nand what a launcher says then\n")
    assert main([str(path), "--json"]) == 0
    found = find_message(path.read_text())
    assert found is not None
    assert found.moment == moment
    report = diagnosed(found.message, moment)
    assert report.rule == rule
    assert report.explanation
    assert report.cures, "general ones, without a config"


def diagnosed(message: str, moment: str = "", **seen: Any) -> Report:
    figures = read_message(message)
    given = {"device": "cuda" if figures.kind == "device" else "", "others": figures.others}
    return diagnose(Observation(message, moment, figures=figures, **given | seen))


def test_both_wordings_to_the_byte() -> None:
    expected = Figures(
        "device",
        requested=2 * GIB,
        allocated=gib(70.10),
        reserved=74 * GIB,
        free=gib(1.20),
        capacity=gib(79.15),
    )
    assert read_message(OLD) == expected
    assert read_message(PLAIN).reserved == gib(70.10) + gib(3.90)
    assert read_message(PLAIN).process == gib(77.90)
    assert read_message(PLAIN).others == 0
    units = new("20.00 MiB", "512.00 KiB", "700 bytes")
    assert read_message(units).requested == 20 * MIB
    assert read_message(units).allocated == 512 * 1024
    assert read_message(units).reserved == 512 * 1024 + 700
    assert read_message(HOST) == Figures("host", requested=4096)
    assert read_message("RuntimeError: shape mismatch, 2.00 GiB free") == Figures()


@pytest.mark.parametrize(
    ("processes", "own", "others"),
    [
        (f"Process 12 has 20.50 GiB memory in use. {OWN}", gib(77.90), gib(20.50)),
        # A container's process ids differ: the one that holds what torch reserves is this one.
        ("Process 123 has 77.90 GiB memory in use. ", gib(77.90), 0),
        (
            "Process 12 has 1.50 GiB memory in use. Process 9 has 76.00 GiB memory in use. ",
            76 * GIB,
            3 * GIB // 2,
        ),
        # A driver that does not know says 2^64 bytes.
        ("Process 123 has 17179869184.00 GiB memory in use. ", None, None),
        ("", None, None),
    ],
)
def test_other_processes(processes: str, own: int | None, others: int | None) -> None:
    message = new("2.00 GiB", "70.10 GiB", "3.90 GiB", processes)
    assert read_message(message).process == own
    assert read_message(message).others == others
    # 1.5 GiB would not have been room for 2 GiB.
    expected = "other_process" if others == gib(20.50) else "capacity"
    assert diagnosed(message).rule == expected


@pytest.mark.parametrize(
    ("requested", "unused", "rule"),
    [
        ("7.00 GiB", "8.00 GiB", "fragmentation"),
        ("8.50 GiB", "8.00 GiB", "capacity"),  # the unused would not have sufficed
        ("1.00 GiB", "7.90 GiB", "capacity"),  # under a tenth of 79.15 GiB
    ],
)
def test_advice_against_fragments_only_where_they_are_the_cause(
    requested: str, unused: str, rule: str
) -> None:
    report = diagnosed(new(requested, "60.00 GiB", unused))
    assert report.rule == rule
    advised = any("training.expandable_segments" in cure.changes for cure in report.cures)
    assert advised == (rule == "fragmentation")
    assert "expandable" not in report.explanation
    already = rule_of(report.observation, expandable_segments=True)
    assert already == "capacity", "segments that expand leave no pieces behind"


def test_the_last_message_of_the_rank_that_has_it() -> None:
    one = traceback(
        ("a.py", "backward", "loss.backward()"), error="MemoryError", prefix="[rank1]: "
    )
    two = traceback(("b.py", "step", "optimizer.step()"), error="MemoryError", prefix="[rank3]: ")
    lines = [line for pair in zip(two.splitlines(), one.splitlines(), strict=True) for line in pair]
    found = find_message("MemoryError\n" + "\n".join(lines))
    assert found is not None
    assert (found.message, found.moment, found.rank) == ("MemoryError", "backward", 1)
    found = find_message("\n".join(lines[:-1]))
    assert found is not None
    assert (found.moment, found.rank) == ("optimizer step", 3)


@pytest.fixture
def small(run_config: dict[str, Any]) -> RunConfig:
    """A vocabulary that makes the loss the peak, and logits that are formed in full."""
    sizes = {"vocabulary_size": 8000, "max_sequence_length": 128, "layers": 4, "dropout": 0.0}
    run_config["model"] |= sizes
    run_config["training"] |= {"sequence_length": 128, "loss": "full"}
    run_config["deepspeed"] |= {"train_batch_size": 16, "gradient_accumulation_steps": 2}
    return RunConfig.model_validate(run_config)


def test_the_loss_is_cured_first_where_it_ran_out(small: RunConfig) -> None:
    now = plan(small, Machine())
    assert now.gpu.peak.moment.startswith("loss")
    logits = 8 * 128 * 8000 * 4
    figures = Figures("device", requested=logits, capacity=now.gpu.peak.total - logits // 2)
    seen = Observation("", "loss forward", 0, "cuda", figures)
    report = diagnose(seen, small, now)
    assert report.rule == "loss"
    assert report.missing == logits
    first, second, *others = report.cures
    assert first.changes == {"training.loss": "auto"}
    assert first.fits
    assert second.changes["deepspeed.train_micro_batch_size_per_gpu"] in (1, 2, 4)
    # Chunks of 512 tokens in place of the 1024 of a micro-batch, for logits and their gradient.
    cured = plan(changed(small, first.changes), Machine())
    assert first.saving == now.gpu.peak.total - cured.gpu.peak.total >= logits
    assert all("training.loss" not in cure.changes for cure in others)


@pytest.mark.parametrize(
    ("short", "capacity", "missing"),
    [
        (5, None, 6),  # what was asked for, at least
        (50, None, 50),
        (50, GIB * 80, 50),  # the plan would have fitted: it is not to be trusted with the limit
    ],
)
def test_cures_suffice_for_what_was_missing(
    short: int, capacity: int | None, missing: int, small: RunConfig
) -> None:
    """Without a limit of the machine, what was held when it failed is the limit."""
    now = plan(small, Machine())
    outside = now.gpu.peak.by_category["allowance"]
    held = now.gpu.peak.total - outside - short * MIB
    figures = Figures("device", 6 * MIB, held, capacity=capacity)
    report = diagnose(Observation("", "block 3 backward", 0, "cuda", figures), small, now)
    assert report.rule == "capacity"
    assert report.missing == missing * MIB
    assert report.cures[0].fits
    for cure in report.cures:
        assert cure.saving is not None
        assert cure.fits == (cure.saving >= missing * MIB)
        if cure.gpus is None:
            then = plan(changed(small, cure.changes), Machine())
            assert now.gpu.peak.total - then.gpu.peak.total == cure.saving


def test_other_processes_leave_less_of_what_the_gpu_has(small: RunConfig) -> None:
    now = plan(small, Machine(gpu_memory=GIB * 80))
    others = GIB * 80 - now.gpu.peak.total + 30 * MIB
    figures = Figures("device", 20 * MIB, capacity=GIB * 80)
    report = diagnose(Observation("", "", 0, "cuda", figures, others=others), small, now)
    assert (report.rule, report.missing) == ("other_process", 30 * MIB)


def test_a_smaller_micro_batch_before_checkpoints_where_the_loss_ran_out(small: RunConfig) -> None:
    """Elsewhere what costs least time is first: the gradients of more micro-batches are sent."""
    stage2 = {"training.loss": "auto", "deepspeed.zero_optimization.stage": 2}
    config = changed(small, {**stage2, "deepspeed.train_batch_size": 32})
    now = plan(config, Machine(gpus=2))
    firsts = []
    for moment in ("loss forward", "block 0 backward"):
        figures = Figures("device", 1024, capacity=now.gpu.peak.total - 1024)
        report = diagnose(Observation("", moment, 0, "cuda", figures), config, now)
        assert report.cures[0].fits
        firsts.append(sorted(report.cures[0].changes))
    assert firsts == [
        ["deepspeed.gradient_accumulation_steps", "deepspeed.train_micro_batch_size_per_gpu"],
        ["activation_checkpointing.policies"],
    ]


def test_a_cpu_has_what_the_plan_had_before_the_moment_that_failed(small: RunConfig) -> None:
    now = plan(small, Machine(kind="CPU"))
    before = 0
    for sample in now.gpu.timeline:
        if sample.moment == "loss forward":
            break
        before = max(before, sample.total)
    held = {"parameters": MIB, "optimizer_states": 0, "rest": MIB}
    seen = Observation(HOST, "loss forward", 0, "cpu", read_message(HOST), held)
    report = diagnose(seen, small, now)
    assert report.rule == "loss"
    assert report.missing == now.gpu.peak.total - before
    assert report.planned is not None
    at_loss = next(sample for sample in now.gpu.timeline if sample.moment == "loss forward")
    assert sum(report.planned.values()) == at_loss.total
    assert report.planned["optimizer_states"] == 0, "of the first step: none are held yet"


def test_a_save_is_cured_by_holding_less(small: RunConfig) -> None:
    now = plan(small, Machine(gpus=2))
    seen = Observation(HOST, "checkpoint save", 0, "cuda", read_message(HOST))
    report = diagnose(seen, small, now)
    assert report.rule == "save"
    assert "deepspeed.zero_optimization.stage" in report.cures[0].changes
    assert not any("activation_checkpointing.policies" in cure.changes for cure in report.cures)


def test_a_host_is_cured_by_what_leaves_it_if_the_gpu_has_room(small: RunConfig) -> None:
    offload = {"device": "cpu", "pin_memory": True}
    zero = "deepspeed.zero_optimization"
    config = changed(small, {f"{zero}.stage": 2, f"{zero}.offload_optimizer": offload})
    now = plan(config, Machine())
    back = {f"{zero}.offload_optimizer": None}
    then = plan(changed(config, back), Machine())
    assert then.gpu.peak.total > now.gpu.peak.total
    for room, alone in ((then.gpu.peak.total, True), (then.gpu.peak.total - 1, False)):
        figures = Figures("host", MIB, capacity=room)
        seen = Observation(HOST, "optimizer step", 0, "cuda", figures)
        report = diagnose(seen, config, now)
        assert report.rule == "host"
        (found,) = (cure for cure in report.cures if back.items() <= cure.changes.items())
        assert found.fits
        assert (found.changes == back) == alone, "else blocks have to keep less, too"
        assert plan(changed(config, found.changes), Machine()).gpu.peak.total <= room


@pytest.mark.parametrize("moment", ["block 0 forward", "optimizer step", "checkpoint save", ""])
def test_reports_come_back_from_json(moment: str, small: RunConfig) -> None:
    now = plan(small, Machine())
    seen = Observation(
        PLAIN, moment, 3, "cuda", read_message(PLAIN), {"parameters": 5, "rest": 7},
        cgroup=Cgroup(GIB, 2),
    )  # fmt: skip
    for report in (diagnose(seen), diagnose(seen, small, now)):
        assert read_report(json.loads(json.dumps(report.as_json()))) == report


def test_the_command_shows_a_report_again(
    small: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = read_message(new("20.00 MiB", "600.00 MiB", "0 bytes"))
    seen = Observation(PLAIN, "loss forward", 3, "cuda", figures)
    report = diagnose(seen, small, plan(small, Machine()))
    (tmp_path / "out_of_memory.json").write_text(json.dumps(report.as_json()))
    assert main([str(tmp_path / "out_of_memory.json")]) == 0
    shown = capsys.readouterr().out
    assert "out of memory on rank 3: loss" in shown
    assert "1. --set training.loss=auto: " in shown


def test_a_log_with_its_config_has_figures(
    small: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(small.model_dump_json())
    (tmp_path / "log").write_text(traceback(MAIN, error=f"RuntimeError: {HOST}"))
    arguments = [str(tmp_path / "log"), "--config", str(tmp_path / "config.json"), "--json"]
    assert main([*arguments, "--gpu", "CPU"]) == 0
    report = read_report(json.loads(capsys.readouterr().out))
    assert report.rule == "capacity", "a CPU's allocator is the device's"
    assert report.missing == 4096
    assert report.cures[0].saving is not None


@pytest.mark.parametrize("text", ["step 1 loss 2.0\n", "", '{"a": 1}', None])
def test_nothing_to_explain(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "log").write_text(text)
    assert main([str(tmp_path / "log")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    two = tmp_path / "two"
    # The job's limit is in a parent of the task's group.
    write(
        two,
        {
            "job/memory.max": "8589934592\n",
            "job/memory.events": "low 0\noom 3\noom_kill 2\n",
            "job/step/memory.max": "17179869184\n",
            "job/step/task/memory.max": "max\n",
            "job/step/task/memory.events": "oom_kill 1\n",
        },
    )
    assert read_cgroup(two, "0::/job/step/task\n") == Cgroup(8 * GIB, 2)
    assert read_cgroup(two, "0::/elsewhere\n") is None
    one = tmp_path / "one"
    write(
        one,
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/docker/abc/memory.limit_in_bytes": "4294967296\n",
            "memory/docker/abc/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
        },
    )
    assert read_cgroup(one, "5:cpuset:/\n4:memory:/docker/abc\n0::/\n") == Cgroup(4 * GIB, 5)
    # In a container the group itself is mounted as the root.
    assert read_cgroup(one, "4:memory:/not/here\n") == Cgroup(None, 0)
    assert read_cgroup(tmp_path / "none", "0::/\n") is None


def test_a_kill_names_the_control_group() -> None:
    report = diagnosed("exits with return code = -9", cgroup=Cgroup(8 * GIB, 2))
    assert report.rule == "host_killed"
    assert "8.00 GiB" in report.explanation
    assert "2 kills" in report.explanation
