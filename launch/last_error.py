"""Why a run failed: the error of the rank that failed first, from the logs of its ranks.

    python -m launch.last_error runs/quickstart/logs/20261207-093000

When a rank dies, the others fail too, with "connection closed by peer"; on a console their lines
come last and hide the one that matters.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

LINES = 40
ERROR = re.compile(
    r"^(\[rank\d+\]: ?)?(Traceback \(most recent call last\)|error: |terminate called"
    r"|Fatal Python error|python: .*error)",
    re.MULTILINE,
)
CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket timeout|remote process exited"
    r"|timed out (after )?waiting|application timeout caused pair closure|no response from",
    re.IGNORECASE,
)
"""What gloo, NCCL and the rendezvous say on ranks that were waiting for one that is gone."""


@dataclass(frozen=True)
class RankLog:
    rank: int
    written: float
    """Seconds since the epoch: a rank's own error is written before its connections close."""
    error: str
    """From its first error on; empty where it reports none."""

    @property
    def is_cause(self) -> bool:
        return bool(self.error) and not CONSEQUENCE.search(self.error)


def read_log(path: Path) -> RankLog:
    text = path.read_text(encoding="utf-8", errors="replace")
    first = ERROR.search(text)
    rank = int(path.stem.removeprefix("rank"))
    return RankLog(rank, path.stat().st_mtime, text[first.start() :] if first else "")


def last_error(folder: Path) -> str:
    """What to tell at the end of a failed run, the ranks' logs being `folder`/rank*.log."""
    logs = sorted(map(read_log, folder.glob("rank*.log")), key=lambda log: log.written)
    causes = [log for log in logs if log.is_cause]
    silent = [str(log.rank) for log in logs if not log.error]
    if causes:
        return shown(causes[0], folder)
    if not logs or not any(log.error for log in logs):
        return f"no rank reports an error; logs in {folder}"
    who = (
        f"rank {', '.join(silent)} ended without an error of its own: killed, or out of memory?"
        if silent
        else "the rank that failed first is on another host"
    )
    return f"{shown(next(log for log in logs if log.error), folder)}\n{who}"


def shown(log: RankLog, folder: Path) -> str:
    lines = log.error.rstrip().splitlines()
    if len(lines) > LINES:
        # The first line says where, the last ones what.
        lines = [lines[0], f"... {len(lines) - LINES} lines ...", *lines[-LINES + 1 :]]
    text = "\n".join(lines)
    return f"rank {log.rank} failed first ({folder}/rank{log.rank}.log):\n{text}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m launch.last_error runs/quickstart/logs/20261207-093000",
    )
    parser.add_argument("logs", type=Path, help="a folder of rank*.log files")
    folder = parser.parse_args().logs
    if not any(folder.glob("rank*.log")):
        print(f"error: {folder}: expected a folder that holds rank*.log files", file=sys.stderr)
        return 2
    print(last_error(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
