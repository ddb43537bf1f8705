"""Run train.py under a launcher: a log for each rank, signals to the ranks, the first error last.

    python -m launch.run deepspeed --num_gpus 2 -- --config configs/quickstart.json

What follows `--` is train.py's. The logs are in RUN_FOLDER/logs/TIME/rankN.log, and rank 0's lines
also on the console. The exit code is the launcher's, but 75 for a run that stopped early and saved,
which torchrun calls 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from configs.reading import ConfigError
from configs.schema import load_config
from launch.last_error import last_error

ROOT = Path(__file__).parent.parent
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
VARIABLES = (
    "PATH",
    "PYTHON",
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "TORCH",
    "OMP_",
    "MASTER_",
    "DS_",
    "PDSH_",
)
"""Beginnings of the names that launchers, torch and its communication libraries read."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    only_print = given[:1] == ["--print"]
    launcher, training = split(given[only_print:])
    try:
        logs = logs_of(training)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = [*launcher, str(Path(__file__).with_name("rank.py")), str(logs), *training]
    if only_print:
        print("\n".join([f"cd {shlex.quote(str(ROOT))}", *environment(), shlex.join(command)]))
        return 0
    return run(command, logs)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's and train.py's arguments, by the first `--`."""
    if "--" not in arguments:
        raise SystemExit("error: expected LAUNCHER [OPTIONS] -- --config CONFIG")
    middle = arguments.index("--")
    return arguments[:middle], arguments[middle + 1 :]


def logs_of(training: Sequence[str]) -> Path:
    """A folder for the logs of this launch, in the run folder that the arguments lead to.

    Raises:
        ConfigError: the config is missing or holds mistakes, found before anything is started.
    """
    parser = argparse.ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[])
    options, _ = parser.parse_known_args(training)
    folder = Path(load_config(options.config, options.set).training.run_folder)
    return folder.absolute() / "logs" / time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def environment() -> list[str]:
    """What a launch takes from the environment, as lines of a shell."""
    return [
        f"export {name}={shlex.quote(value)}"
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES)
    ]


def run(command: Sequence[str], logs: Path) -> int:
    """Returns the exit code."""
    # In a session of its own: Ctrl-C would end the launcher before its ranks have saved.
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)

    def forward(number: int, _: FrameType | None) -> None:
        for target in ranks_of(process.pid) or [process]:
            target.send_signal(number)

    for number in SIGNALS:
        signal.signal(number, forward)
    code = process.wait()
    if code and stopped_early(logs):
        return os.EX_TEMPFAIL
    if code and any(logs.glob("rank*.log")):
        print(f"\n{last_error(logs)}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks of this host that a launcher has started.

    Launchers answer signals each in a way of its own: `deepspeed` ends and leaves its ranks,
    torchrun gives them 30 seconds. A rank that is asked itself has the time that its save takes.
    """
    ranks = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            if str(ROOT / "train.py") in process.cmdline()[:3]:
                ranks.append(process)
    return ranks


def stopped_early(logs: Path) -> bool:
    """Whether rank 0, if it ran on this host, has said so in its last words."""
    log = logs / "rank0.log"
    return log.exists() and any(
        line.startswith("stopped by ")
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
    )


if __name__ == "__main__":
    sys.exit(main())
