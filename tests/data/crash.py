"""Runs a command of data/ in small steps, and can end it at any of them.

    python crash.py STEP SIGNAL MODULE ARGUMENTS

sends this process SIGNAL within its STEP-th change of the disk, half of which is then done; with
STEP 0 it counts the changes and prints their number last on standard error.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data.deduplicate
import data.files
import data.output
import data.plan
import data.preparation


class Steps:
    def __init__(self, last: int, number: int) -> None:
        self.count, self.last, self.signal = 0, last, number

    def before(self, function: Callable[..., Any], half: Callable[..., Any] | None = None) -> Any:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            if self.count == self.last:
                if half is not None:
                    half(*arguments)
                os.kill(os.getpid(), self.signal)
            return function(*arguments, **keywords)

        return counted


def half_write(file: data.files.SyncedFile, content: bytes) -> None:
    file._stream.write(content[: len(content) // 2])
    file._stream.flush()


def half_remove(path: Path, **_: Any) -> None:
    for inner in sorted(Path(path).iterdir())[::2]:
        if inner.is_file():
            inner.unlink()


def main() -> int:
    step, number, module, *arguments = sys.argv[1:]
    steps = Steps(int(step), int(number))
    data.files.SyncedFile.write = steps.before(data.files.SyncedFile.write, half_write)  # type: ignore[method-assign]
    data.files.SyncedFile.sync = steps.before(data.files.SyncedFile.sync)  # type: ignore[method-assign]
    shutil.rmtree = steps.before(shutil.rmtree, half_remove)  # type: ignore[assignment]
    for name in ("rename", "replace", "unlink", "mkdir"):
        setattr(Path, name, steps.before(getattr(Path, name)))
    data.plan.CHUNK_BYTES = data.plan._JOB_BYTES = 4000
    data.preparation._COMMIT_PARTS = 3
    data.output._BLOCK_DOCUMENTS = 5
    data.deduplicate._RANGE_DOCUMENTS = 7
    data.deduplicate._BLOCK_BYTES = 16 * 11
    data.deduplicate._PARTITION_DOCUMENTS = 8
    sys.argv = [module, *arguments]
    code = importlib.import_module(module).main()
    print(steps.count, file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
