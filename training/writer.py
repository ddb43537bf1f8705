"""A rank's files of a checkpoint: what DeepSpeed hands over is copied, then written and hashed."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor

from training.store import Written, naming
from training.unpickling import load_states


class Writer(CheckpointEngine):
    """DeepSpeed's checkpoint engine: save() keeps the states, write() puts them on disk.

    With copies=True, write() may run in a thread while training goes on.
    """

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.name = "Writer"
        self.staging = Staging() if copies else None
        self._states: dict[Path, Any] = {}

    def create(self, info: Any) -> None:
        self._states = {}
        if self.staging:
            self.staging.rewind()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Rank 0 has made the folder."""

    def save(self, state_dict: Any, path: str) -> None:
        self._states[Path(path)] = self.staging.copy(state_dict) if self.staging else state_dict

    def commit(self, info: Any) -> bool:
        if self.staging:
            self.staging.wait()
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_states(path, map_location=map_location)

    def size(self) -> int:
        """Bytes of the tensors that write() will write."""
        size = 0
        for state in self._states.values():
            storages = [tensor.untyped_storage() for tensor in tensors(state)]
            size += sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        return size

    def write(self) -> dict[str, Written]:
        """By name. On return all is on disk, but for the folder's own entry.

        Raises:
            OSError: the disk is full, a limit is reached, ...
        """
        written = {}
        while self._states:
            path, state = self._states.popitem()
            written[path.name] = write_states(state, path)
        return written


class Staging:
    """Host memory for a copy of a rank's states, kept from save to save.

    New memory costs several times the copy: the system gives it page by page.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        self._copied: dict[int, Tensor] = {}
        self._sources: list[Tensor] = []

    def rewind(self) -> None:
        """All buffers may be written over."""
        self._used = 0
        self._copied, self._sources = {}, []

    def copy(self, state: Any) -> Any:
        """The same objects with tensors on the host that nothing else changes."""
        memo: dict[int, Any] = {}
        for tensor in tensors(state):
            if type(tensor) in (Tensor, torch.nn.Parameter):
                memo[id(tensor)] = copied = self._copy_tensor(tensor)
                copied.__dict__.update(copy.deepcopy(tensor.__dict__, memo))  # saved too
        return copy.deepcopy(state, memo)

    def wait(self) -> None:
        """Until copies from a GPU have arrived; what they came from is free again."""
        if any(source.is_cuda for source in self._sources):
            torch.cuda.synchronize()
        self._copied, self._sources = {}, []

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._copied:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            buffer = self._buffer(source)
            buffer.copy_(source, non_blocking=True)
            self._copied[storage._cdata] = buffer
            self._sources.append(source)
        staged = torch.empty(0, dtype=tensor.dtype).set_(
            self._copied[storage._cdata].untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(staged, tensor.requires_grad)
        return staged.requires_grad_(tensor.requires_grad)

    def _buffer(self, like: Tensor) -> Tensor:
        place, self._used = self._used, self._used + 1
        if place < len(self._buffers) and self._buffers[place].numel() == like.numel():
            return self._buffers[place]
        buffer = torch.empty(like.numel(), dtype=torch.uint8, pin_memory=like.is_cuda)
        self._buffers[place : place + 1] = [buffer]
        return buffer


def tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of nested containers, those that occur twice twice."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors(value)


def write_states(state: Any, path: Path) -> Written:
    """
    Raises:
        OSError: the file could not be written in full.
    """
    with HashedFile(path) as file:
        try:
            torch.save(state, file)  # type: ignore[arg-type]
        except RuntimeError:
            # torch writes on after an error, and reports what that leads to.
            if file.error is None:
                raise
            raise file.error from None
        return file.close()


class HashedFile:
    """A new file whose checksum is computed as it is written, beside the writing."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._digest, self._size = hashlib.sha256(), 0
        self._hasher = ThreadPoolExecutor(1)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()
        self._file.close()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        hashed = self._hasher.submit(self._digest.update, view)
        try:
            done = 0
            with naming(self._path):
                while done < len(view):
                    done += self._file.write(view[done:])
        except OSError as error:
            self.error = self.error or error
            raise
        finally:
            hashed.result()
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Part of what torch takes for a file; nothing is buffered."""

    def close(self) -> Written:
        with naming(self._path):
            os.fsync(self._file.fileno())
        return Written(bytes=self._size, sha256=self._digest.hexdigest())
