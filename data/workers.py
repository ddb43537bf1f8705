"""A pool of worker processes that notices at once when one of them dies.

multiprocessing.Pool waits for ever for the answer of a process that was killed, and
concurrent.futures does not say which one it was, nor what it was doing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

Job = TypeVar("Job")


class WorkerDied(RuntimeError):
    """A worker process ended without an answer."""

    def __init__(self, job: Any, exit_code: int) -> None:
        self.job = job
        self.exit_code = exit_code
        self.cause = (
            f"was killed by {signal.Signals(-exit_code).name}"
            if exit_code < 0
            else f"exited with code {exit_code}"
        )
        super().__init__(f"a worker {self.cause}")


class Event(NamedTuple, Generic[Job]):
    """What a worker says of its job."""

    job: Job
    done: bool
    content: Any
    """The result of a job that is done, else what the job reported."""


class WorkerPool(Generic[Job]):
    """Processes that each make a handler once and call it with one job after another.

    Args:
        make_handler: called in each worker with `arguments`; returns a function of (job, report).
            All of them are pickled.
        workers: processes.

    Leaving the `with` block kills them.
    """

    def __init__(
        self, make_handler: Callable[..., Any], arguments: tuple[Any, ...], workers: int
    ) -> None:
        self._make_handler, self._arguments, self._count = make_handler, arguments, workers
        self._processes: dict[Connection, BaseProcess] = {}
        self._jobs: dict[Connection, Job] = {}

    def __enter__(self) -> WorkerPool[Job]:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def run(self, jobs: Iterable[Job]) -> Iterator[Event[Job]]:
        """Hands out the jobs in order and yields what is said of them, as it comes.

        Raises:
            WorkerDied: a worker was killed or crashed.
            Whatever the handler raised.
        """
        waiting = iter(jobs)
        for job in waiting:
            connection = self._start()
            self._hand_out(connection, job)
            if len(self._processes) == self._count:
                break
        while self._jobs:
            for ready in wait(list(self._jobs)):
                assert isinstance(ready, Connection)
                event = self._receive(ready)
                if event.done:
                    del self._jobs[ready]
                    for job in waiting:
                        self._hand_out(ready, job)
                        break
                yield event

    def _start(self) -> Connection:
        # A fork would copy the locks of the threads of whoever calls this, but not the threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(theirs, self._make_handler, self._arguments), daemon=True
        )
        # Ctrl-C reaches every process of the terminal: the parent alone answers it. A new process
        # inherits that a signal is ignored.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        # The worker's end must be open in the worker alone, or its death would not be seen.
        theirs.close()
        self._processes[ours] = process
        return ours

    def _hand_out(self, connection: Connection, job: Job) -> None:
        self._jobs[connection] = job
        try:
            connection.send(job)
        except BrokenPipeError:
            raise self._death(connection) from None

    def _receive(self, connection: Connection) -> Event[Job]:
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death(connection) from None
        if kind == "failed":
            raise content
        return Event(self._jobs[connection], kind == "done", content)

    def _death(self, connection: Connection) -> WorkerDied:
        process = self._processes[connection]
        process.join()
        return WorkerDied(self._jobs[connection], process.exitcode or 0)


def _work(
    connection: Connection, make_handler: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    # One core each: Hugging Face's library would take all of them in every worker.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        handler = make_handler(*arguments)
        while True:
            job = connection.recv()
            result = handler(job, lambda *report: connection.send(("report", report)))
            connection.send(("done", result))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except (ValueError, OSError, MemoryError) as problem:
        connection.send(("failed", problem))
    except Exception:  # a fault of ours: its place must not be lost on the way
        connection.send(("failed", RuntimeError(traceback.format_exc())))


def _follow_parent() -> None:
    """Ends this process with its parent, even one that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
