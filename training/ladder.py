"""Write the tables of configs/README.md: every config of the ladder, planned.

python -m training.ladder
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from configs.schema import RunConfig, load_config
from memory.fit import plan as plan_of
from memory.machine import Machine, parse_bytes
from memory.planner import Plan, Planner
from memory.policies import describe_policies
from training.check import Amounts, amounts_of, show_duration

CONFIGS = Path(__file__).parent.parent / "configs"
README = CONFIGS / "README.md"
MARKS = "<!-- {} planned: python -m training.ladder -->"
GPU_MEMORY, HOST_MEMORY = parse_bytes("80GiB"), parse_bytes("2TiB")
OFFLOAD = 'deepspeed.zero_optimization.offload_optimizer={"device": "cpu"}'
NO_OFFLOAD = "deepspeed.zero_optimization.offload_optimizer=null"


class Row(NamedTuple):
    name: str
    gpus: int = 8
    overrides: tuple[str, ...] = ()


LADDER = [Row(name) for name in ("125m", "350m", "1b", "3b", "7b", "13b", "20b", "llama-7b")]
VARIANTS = [
    Row("1b", 1),
    Row("3b", 1, (OFFLOAD,)),
    Row("7b", 1, (OFFLOAD, "deepspeed.train_micro_batch_size_per_gpu=4")),
    Row("13b", 8, (NO_OFFLOAD,)),
    Row("13b", 16, (NO_OFFLOAD,)),
    Row("20b", 16),
    Row("20b", 16, (NO_OFFLOAD,)),
    Row("20b", 24, (NO_OFFLOAD,)),
    Row("20b", 32, (NO_OFFLOAD,)),
    Row("20b", 8, ("deepspeed.zero_optimization.stage=3",)),
    Row("20b", 8, ("deepspeed.zero_optimization.stage=3", NO_OFFLOAD)),
    Row("20b", 8, ("deepspeed.tensor_parallel.autotp_size=2",)),
]


class Planned(NamedTuple):
    row: Row
    config: RunConfig
    planner: Planner
    plan: Plan
    amounts: Amounts


def planned(row: Row) -> Planned:
    config = load_config(str(CONFIGS / f"{row.name}.json"), row.overrides)
    machine = Machine(row.gpus, 8, GPU_MEMORY, HOST_MEMORY)
    plan = plan_of(config, machine)
    assert plan.fits, row
    planner = Planner(config, plan.machine)
    return Planned(row, config, planner, plan, amounts_of(planner, plan))


def runs_table(entries: Sequence[Planned]) -> str:
    """What is trained."""
    head = ["config", "parameters", "tokens a step", "steps", "tokens", "FLOPs", "a checkpoint"]
    rows = [
        [
            entry.row.name,
            f"{entry.config.model.parameter_count():,}",
            f"{entry.amounts.tokens_per_step:,}",
            f"{entry.amounts.steps:,}",
            f"{entry.amounts.tokens / 1e9:,.0f} G",
            f"{entry.amounts.flops:.3g}",
            _gib(entry.plan.checkpoint_bytes),
        ]
        for entry in entries
    ]
    return _table(head, rows)


def plans_table(entries: Sequence[Planned]) -> str:
    """On what, and how."""
    head = ["config", "with", "GPUs", "ZeRO", "micro-batch", "blocks", "GPU", "host", "a step",
            "whole run", "MFU"]  # fmt: skip
    rows = [
        [
            entry.row.name,
            "<br>".join(f"`{_short(override)}`" for override in entry.row.overrides),
            str(entry.row.gpus),
            _zero(entry.planner),
            str(entry.planner.section["train_micro_batch_size_per_gpu"]),
            describe_policies(entry.plan.policies),
            _gib(entry.plan.gpu.peak.total),
            _gib(entry.plan.host.peak.total),
            f"{entry.plan.step.total:.3g} s",
            show_duration(entry.amounts.days),
            f"{entry.amounts.mfu:.0%}",
        ]
        for entry in entries
    ]
    if not any(entry.row.overrides for entry in entries):
        head, rows = head[:1] + head[2:], [row[:1] + row[2:] for row in rows]
    return _table(head, rows)


def tables() -> str:
    ladder = [planned(row) for row in LADDER]
    variants = [planned(row) for row in VARIANTS]
    return "\n\n".join([runs_table(ladder), plans_table(ladder), plans_table(variants)])


def _zero(planner: Planner) -> str:
    offloads = " + offload" if planner.setup.offloads_optimizer else ""
    return f"{planner.setup.stage}{offloads}"


def _short(override: str) -> str:
    return override.replace("deepspeed.zero_optimization.", "…").replace("deepspeed.", "…")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_tables(text: str, new: str) -> str:
    """The README's text with other tables."""
    begin, end = MARKS.format("begin"), MARKS.format("end")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{new}\n{end}{after}"


def main() -> int:
    README.write_text(with_tables(README.read_text(), tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
