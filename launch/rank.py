"""One rank: train.py, its output in LOGS/rankN.log, rank 0's on the console too.

launch/run.py gives this to launchers in train.py's place: `launch/rank.py LOGS ARGUMENTS`. It
becomes train.py, so signals, exit codes and process ids are those of the rank itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main() -> NoReturn:
    logs, *arguments = sys.argv[1:]
    log = Path(logs) / f"rank{os.environ['RANK']}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if os.environ["RANK"] == "0":
        output = open_tee(log)
    else:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    train = Path(__file__).parent.parent / "train.py"
    os.execv(sys.executable, [sys.executable, "-u", str(train), *arguments])


def open_tee(log: Path) -> int:
    """A file descriptor whose text goes to `log` and to the console."""
    # Launchers signal every process of a rank, and tee has to outlive the one that saves.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    tee = subprocess.Popen(["tee", "--append", str(log)], stdin=subprocess.PIPE)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    assert tee.stdin is not None
    return os.dup(tee.stdin.fileno())


if __name__ == "__main__":
    main()
