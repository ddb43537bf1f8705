"""Reading a checkpoint's files without running what they say.

A pickle can name any function of any module and have it called. torch's weights_only refuses all
but tensors and plain containers; DeepSpeed's optimizer files also hold the few classes below, which
only keep values.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

_load = torch.load


class Refused(ValueError):
    """A file that holds more than values, or is no checkpoint file at all."""


def load_states(path: str | Path, *, map_location: Any = "cpu", mmap: bool | None = None) -> Any:
    """
    Raises:
        Refused: nothing of the file was run.
    """
    try:
        with torch.serialization.safe_globals(_harmless(path)):
            return _load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's first line names the function; the rest advises to allow it.
        lines = [line.strip() for line in str(error).splitlines() if "nsupported" in line]
        reason = lines[0].removeprefix("WeightsUnpickler error: ") if lines else "not torch's"
        raise Refused(f"{path}: refused, it holds more than values: {reason}") from None


def _harmless(path: str | Path) -> list[Any]:
    """DeepSpeed's classes, imported only for a file that names some: that takes seconds."""
    if zipfile.is_zipfile(path) and not get_unsafe_globals_in_checkpoint(path):
        return []
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def values_only() -> Iterator[None]:
    """DeepSpeed's own readers call torch.load with weights_only=False; not while this lasts."""

    def load(file: Any, map_location: Any = None, mmap: bool | None = None, **_: Any) -> Any:
        return load_states(file, map_location=map_location, mmap=mmap)

    with mock.patch.object(torch, "load", load):
        yield
