"""Train in forked processes that die as they are told to, and resume: what is imported is shared.

    crash_worker.py WHOLE CONFIG RANKS DEATHS RESULT

First the config WHOLE is trained undisturbed: what that imports, the others need not. DEATHS is a
JSON list, a life each: {"rank": R, "operation": N} dies before its N-th operation on files once
training has begun, {"rank": R, "seconds": S} S seconds after that. After the last comes a life that
ends by itself. RESULT gets how each life ended, the operations that were cut off, and which samples
were trained on, after all that was trained in vain is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import train
from data.loader import Loader
from training import saver, session, writer

WATCHED = ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


class Journal(Loader):
    """Writes down which samples are handed out, before they are."""

    path: Path

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._next_samples = self.first_samples
        with self.path.open("a") as file:
            file.write(json.dumps({"from": self.samples_consumed}) + "\n")

    def __next__(self) -> Any:
        samples = list(self._next_samples)
        start = self._next_samples.start + self._samples_per_micro_step
        self._next_samples = range(start, start + len(samples))
        with self.path.open("a") as file:
            file.write(json.dumps({"at": self.samples_consumed, "samples": samples}) + "\n")
        return super().__next__()


def surviving(path: Path) -> list[int]:
    """Samples of the steps that no later life began before."""
    history: list[tuple[int, list[int]]] = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "from" in line:
            history = [entry for entry in history if entry[0] < line["from"]]
        else:
            history.append((line["at"], line["samples"]))
    return list(itertools.chain.from_iterable(samples for _, samples in history))


def die(path: Path, what: str) -> None:
    path.write_text(what)
    os.kill(os.getpid(), signal.SIGKILL)


def arm(death: dict[str, Any], note: Path) -> None:
    """From the moment on that training begins."""
    count = itertools.count(1)

    def counted(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if next(count) == death.get("operation"):
            die(note, name)
        return function(*arguments, **options)

    def begin(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        if "seconds" in death:
            threading.Timer(death["seconds"], partial(die, note, "any moment")).start()
        for name in WATCHED:
            setattr(os, name, partial(counted, name, getattr(os, name)))
        file = writer.HashedFile
        file.__init__ = partialmethod("open", file.__init__)  # type: ignore[method-assign]
        file.write = halfway(file.write)  # type: ignore[method-assign]

    def partialmethod(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: counted(name, function, *arguments)

    def halfway(function: Callable[..., int]) -> Callable[..., int]:
        def write(self: Any, data: Any) -> int:
            view = memoryview(data).cast("B")
            if len(view) < 4096:  # one of the many small pieces between the tensors
                return function(self, data)
            half = function(self, view[: len(view) // 2])
            return half + counted("write", function, self, view[len(view) // 2 :])

        return write

    start = saver.Saver.__init__
    saver.Saver.__init__ = begin  # type: ignore[method-assign]


def live(config: str, rank: int, ranks: int, port: int, death: dict[str, Any], folder: Path) -> int:
    """Process id of a rank that trains."""
    if child := os.fork():
        return child
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= address | {name: str(value) for name, value in places.items()}
    Journal.path = folder / f"journal-{rank}"
    session.Loader = Journal  # type: ignore[misc]
    if death.get("rank") == rank:
        arm(death, folder / "note")
    code = 1
    try:
        code = train.main(["--config", config])
        if death.get("imports") and rank == 0:
            (folder / "modules").write_text(json.dumps([*sys.modules]))
    finally:
        os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def import_all(modules: list[str]) -> None:
    """Else each life would spend seconds on torch's compiler, which no step uses."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def main(whole: str, config: str, ranks: int, deaths: list[dict[str, Any]], result: Path) -> None:
    folder = result.parent
    port = free_port()
    for rank in range(ranks):
        live(whole, rank, ranks, port, {"imports": True}, folder / "whole")
    for _ in range(ranks):
        os.wait()
    import_all(json.loads((folder / "whole" / "modules").read_text()))
    ends, notes = [], []
    for death in [*deaths, {}]:
        port = free_port()
        children = {live(config, rank, ranks, port, death, folder) for rank in range(ranks)}
        codes = []
        while children:
            child, status = os.wait()
            children.remove(child)
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1]:
                for other in children:
                    os.kill(other, signal.SIGKILL)
        ends.append(codes[0])
        note = folder / "note"
        notes.append(note.read_text() if note.exists() else None)
        note.unlink(missing_ok=True)
    samples = [surviving(folder / f"journal-{rank}") for rank in range(ranks)]
    result.write_text(json.dumps({"ends": ends, "notes": notes, "samples": samples}))


if __name__ == "__main__":
    whole, config, ranks, deaths, result = sys.argv[1:]
    main(whole, config, int(ranks), json.loads(deaths), Path(result))
