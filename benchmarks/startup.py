"""From starting the process to the end of the first step, and what that time is made of.

    python -m benchmarks.startup --output benchmarks/results/startup_CPU_DATE.md

Needs the quickstart's corpus (`make corpus`).
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.measure import parse_options, report

IMPORTS = {"everything": "train", "of it torch": "torch", "of it DeepSpeed": "deepspeed"}


def seconds_to_first_step() -> tuple[float, float]:
    """(process start to the description of the run, to the first logged step)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "--config", "configs/quickstart.json"]
        for override in (
            f"training.run_folder={folder}/run",
            "training.max_steps=1",
            "training.log_interval=1",
            "deepspeed.scheduler.params.warmup_num_steps=1",
        ):
            command += ["--set", override]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            described = first = 0.0
            for line in process.stdout:
                now = time.perf_counter() - start
                if line.startswith("model "):
                    described = now
                if line.startswith("step      1/"):
                    first = now
        return described, first


def import_seconds() -> dict[str, float]:
    """Cumulative import time of each package, as `python -X importtime` sees it."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import train"], capture_output=True, text=True
    )
    cumulative = {}
    for line in done.stderr.splitlines():
        if match := re.match(r"import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", line):
            cumulative[match[2]] = int(match[1]) / 1e6
    return {name: cumulative[module] for name, module in IMPORTS.items()}


def main() -> None:
    options = parse_options(__doc__, rounds=5)
    described, first = zip(*(seconds_to_first_step() for _ in range(options.rounds)), strict=True)
    lines = ["| from process start | median seconds |", "|---|---|"]
    lines.append(f"| to a built engine | {statistics.median(described):.1f} |")
    lines.append(f"| to the first logged step | {statistics.median(first):.1f} |")
    lines += [
        "",
        "Of these, imports (one run):",
        "",
        "| import | seconds |",
        "|---|---|",
    ]
    lines += [f"| {name} | {seconds:.2f} |" for name, seconds in import_seconds().items()]
    lines += [
        "",
        "Between the engine and the first step lie the untrained model's evaluation on 128",
    ]
    lines += ["samples, the GEMM probe and the step itself."]
    report("Start-up of the quickstart, corpus prepared", lines, options.output)


if __name__ == "__main__":
    main()
