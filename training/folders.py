"""A folder that is there when all of it is on disk, and not before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training import store


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, PATH.partial-..., that becomes `path`; removed if that fails.

    Raises:
        FileExistsError: `path` exists already, and is not an empty folder.
    """
    path = path.resolve()
    require_free(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        store.others(partial, [])  # all of it is on disk
        store.sync_folder(partial)
        partial.rename(path)  # an empty folder gives way
        store.sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def require_free(path: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path}: exists already; choose another folder, or remove it")
