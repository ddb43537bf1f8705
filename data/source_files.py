"""Which files a source names.

Files whose names begin with a dot are left out of folders and wildcards, as in a shell. Symbolic
links are followed.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.hugging_face import drop_unsaved

PYTHON_STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")

# Tests hold invalid encodings on purpose, and distributions package them apart; the rest is not the
# standard library's own.
_STDLIB_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})

_WILDCARD = re.compile(r"[*?[]")


def source_files(source: str) -> list[Path]:
    """The files of one source, sorted by path.

    Raises:
        ValueError: it names no file, a file of an unknown kind, or a folder linked into itself.
        OSError: a file or folder is missing or cannot be read.
    """
    root = Path(source)
    if source == PYTHON_STDLIB:
        files = _stdlib_files()
    elif root.is_dir():
        files = [path for path in _walk(root) if path.name.endswith(SUFFIXES)]
        files = drop_unsaved(files, root)
    elif os.path.lexists(root):
        files = [root]
    elif _WILDCARD.search(source):
        files = [path for path in _matches(root) if not path.is_dir()]
        if not files:
            raise ValueError(f"source {source!r}: the pattern matches no file")
    else:
        raise FileNotFoundError(
            f"source {source!r} does not exist: expected a file, a folder, a pattern such as "
            f"'folder/**/*.jsonl', hf:DATASET or {PYTHON_STDLIB!r}"
        )
    if not files:
        raise ValueError(f"source {source!r}: {root} holds no file ending in {', '.join(SUFFIXES)}")
    for path in files:
        if source != PYTHON_STDLIB and not path.name.endswith(SUFFIXES):
            raise ValueError(
                f"source {source!r}: expected files ending in {', '.join(SUFFIXES)}, found {path}"
            )
        _check_readable(path)
    return sorted(files, key=Path.as_posix)


def _check_readable(path: Path) -> None:
    """Before hours of work, not in the midst of it."""
    path.stat()
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path
        for path in root.rglob("*.py")
        if path.is_file() and _STDLIB_EXCLUDED.isdisjoint(path.relative_to(root).parts)
    ]


def _walk(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """All files and folders below, in no order."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise ValueError(f"{folder}: a symbolic link to a folder that holds it")
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        yield path
        if path.is_dir():
            yield from _walk(path, (*above, identity))


def _matches(pattern: Path) -> Iterator[Path]:
    parts = pattern.parts
    first = next(i for i, part in enumerate(parts) if _WILDCARD.search(part))
    rest = (*parts[first:], "*") if parts[-1] == "**" else parts[first:]
    # Two `**` can find one file by two ways.
    return iter(dict.fromkeys(_expanded(Path(*parts[:first]), rest)))


def _expanded(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The paths below `base` that match; `**` stands for any number of folders, also none."""
    if not parts:
        yield base
    elif not base.is_dir():
        return
    elif parts[0] == "**":
        yield from _expanded(base, parts[1:])
        for path in _walk(base):
            if path.is_dir():
                yield from _expanded(path, parts[1:])
    elif _WILDCARD.search(parts[0]):
        hidden = parts[0].startswith(".")
        for path in base.iterdir():
            if fnmatch.fnmatchcase(path.name, parts[0]) and path.name.startswith(".") == hidden:
                yield from _expanded(path, parts[1:])
    elif os.path.lexists(base / parts[0]):
        yield from _expanded(base / parts[0], parts[1:])
