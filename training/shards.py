"""Weights in safetensors files: written a shard at a time, read a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 4 << 30
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


class Item(NamedTuple):
    """Tensors that are made together."""

    bytes: int
    """At most."""
    make: Callable[[], dict[str, Tensor]]


def write_shards(folder: Path, items: Sequence[Item], limit: int = SHARD_BYTES) -> None:
    """Files of at most `limit` bytes, or of one item, under the names that transformers looks for.

    One shard is in memory at a time.

    Raises:
        OSError: a file cannot be written.
    """
    shards = _split(items, limit)
    placed: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, start=1):
        name = WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: tensor for item in shard for key, tensor in item.make().items()}
        try:
            save_file(tensors, folder / name, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / name}: cannot be written: {error}") from None
        (folder / name).chmod(0o644)  # the library keeps it to its owner
        size += sum(tensor.nbytes for tensor in tensors.values())
        placed |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split(items: Sequence[Item], limit: int) -> list[list[Item]]:
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.bytes
    return shards


class Shards:
    """The tensors of a folder's safetensors files by name.

    Raises:
        ValueError: there are none, one is missing, damaged or cut off, or of numbers that are not
            floating-point ones of 16 or 32 bits.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in _listed(folder):
            try:
                file = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                reason = "missing" if not path.exists() else f"damaged or cut off: {error}"
                raise ValueError(f"{path}: {reason}") from None
            self._files |= dict.fromkeys(file.keys(), file)
        for name, file in self._files.items():
            if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"{folder}: {name} is of {dtype}, expected {', '.join(DTYPES)}")

    def shapes(self) -> Mapping[str, Sequence[int]]:
        return {name: file.get_slice(name).get_shape() for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _listed(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / WHOLE).exists():
            raise ValueError(
                f"{folder}: holds no weights: expected {WHOLE}, or {INDEX} and its files (other "
                "formats are not read: transformers' save_pretrained writes this one)"
            )
        return [folder / WHOLE]
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index}: damaged: expected a weight_map of file names") from None
