"""Checkpoint folders on disk: their manifest, what is damaged, which to keep. Knows no tensors.

checkpoints/step-00000100/             complete: renamed to this when all of it was on disk
checkpoints/step-00000100/manifest.json    sizes and checksums of all its files, written last
checkpoints/latest                     the newest one's name, for other tools
checkpoints/unfinished-step-00000200/  being written, or left behind by a crash
checkpoints/deleted-step-00000050/     being deleted
checkpoints/damaged-step-00000150/     was newer than the one a run continued from
checkpoints/universal-step-00000100/   while it is loaded by ranks that its shards do not fit
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

MANIFEST = "manifest.json"
UNFINISHED, DELETED, DAMAGED = "unfinished-", "deleted-", "damaged-"
UNIVERSAL = "universal-"
INITIAL = "initial"
"""In a run folder, weights to start from: training/import_model.py."""
CHUNK = 1 << 20
"""Bytes read at a time: small enough for the cache that the hash then finds them in."""
SEAL = re.compile(rb'\{\n "sha256": "([0-9a-f]{64})",\n')


class Damaged(ValueError):
    """A checkpoint that cannot be used, and why, in one line."""


class Written(BaseModel):
    """A file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint consists of, and of which run it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    format: Literal[1] = 1
    progress: dict[str, Any]
    """Fields of training.checkpoint.Progress."""
    zero_stage: int
    tensor_parallel: int
    precision: str
    versions: dict[str, str]
    config: dict[str, Any]
    """The run's."""
    deepspeed: dict[str, Any]
    """DeepSpeed's section as resolved for the hardware."""
    files: dict[str, Written]
    """By path within the checkpoint."""

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: dict[str, Written]) -> dict[str, Written]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{name!r} is not a path within the checkpoint")
        return files


def name_of(step: int) -> str:
    return f"step-{step:08}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def candidates(checkpoints: Path) -> list[Path]:
    """Folders named as checkpoints are, newest first."""
    found = [path for path in checkpoints.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The file's second line is the SHA-256 of all that follows it."""
    body = manifest.model_dump_json(indent=1).removeprefix("{\n")
    seal = hashlib.sha256(body.encode()).hexdigest()
    write_durably(folder / MANIFEST, f'{{\n "sha256": "{seal}",\n{body}')


def read_manifest(checkpoint: Path) -> Manifest:
    """
    Raises:
        Damaged: there is none, or it is not as it was written.
    """
    try:
        data = (checkpoint / MANIFEST).read_bytes()
    except OSError as error:
        missing = "missing: the checkpoint is not complete"
        reason = missing if isinstance(error, FileNotFoundError) else error.strerror
        raise Damaged(f"{MANIFEST}: {reason}") from None
    seal = SEAL.match(data)
    body = data[seal.end() :] if seal else b""
    if seal is None or hashlib.sha256(body).hexdigest().encode() != seal[1]:
        raise Damaged(f"{MANIFEST}: damaged, its checksum does not match")
    try:
        return Manifest.model_validate_json(b"{" + body)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise Damaged(f"{MANIFEST}: {key}: {detail['msg']}") from None


def verify(checkpoint: Path, manifest: Manifest, *, rank: int = 0, ranks: int = 1) -> None:
    """Compare the files with the manifest: the sizes of all, the contents of this rank's share.

    Raises:
        Damaged: naming the first file that is not as it was written.
    """
    for name, written in manifest.files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{name}: missing") from None
        if size != written.bytes:
            found = f"{size:,} bytes" if size else "empty"
            raise Damaged(f"{name}: {found}, expected {written.bytes:,} bytes")
    for name in sorted(manifest.files)[rank::ranks]:
        try:
            digest = checksum(checkpoint / name)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        if digest != manifest.files[name].sha256:
            raise Damaged(f"{name}: damaged, its checksum does not match")


def checksum(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def complete(unfinished: Path, manifest: Manifest) -> Path:
    """Give a folder whose files are all on disk its manifest and its name, then point `latest` at
    it. Every step is on disk before the next begins.

    Raises:
        OSError: something could not be written, or there is a checkpoint of this name.
    """
    checkpoints = unfinished.parent
    final = checkpoints / unfinished.name.removeprefix(UNFINISHED)
    write_manifest(unfinished, manifest)
    sync_folder(unfinished)
    if final.exists():
        raise FileExistsError(f"{final}: is there already; does another run write here?")
    # All that takes room, before it is complete.
    pointer = written_beside(checkpoints / "latest", final.name)
    unfinished.rename(final)
    sync_folder(checkpoints)
    rename_durably(pointer, checkpoints / "latest")
    return final


def others(folder: Path, known: Iterable[Mapping[str, Written]]) -> dict[str, Written]:
    """Files that DeepSpeed itself has put there, now on disk too: copies of NVMe offload."""
    names = {name for files in known for name in files}
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            sync_folder(path)
        elif name not in names:
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
            found[name] = Written(bytes=path.stat().st_size, sha256=checksum(path))
    return found


def write_durably(path: Path, text: str) -> None:
    """Replace a file: whatever happens, it holds its old text or all of the new."""
    rename_durably(written_beside(path, text), path)


def written_beside(path: Path, text: str) -> Path:
    """A file on disk, ready to take the place of `path`; none is left where there is no room.

    Raises:
        OSError: naming it.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(temporary), temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    return temporary


def rename_durably(path: Path, name: Path) -> None:
    path.replace(name)
    sync_folder(name.parent)


def sync_folder(folder: Path) -> None:
    """Names of new files are data of their folder."""
    with naming(folder):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Python names the file of an error only where it opens or moves one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def pointed_at(checkpoints: Path) -> str | None:
    """What `latest` says; None where there is no such file."""
    try:
        return (checkpoints / "latest").read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """No run deletes the checkpoint meanwhile. Where a file system has no locks, nothing is held.

    Raises:
        Damaged: it is being deleted already.
    """
    try:
        file = (checkpoint / MANIFEST).open("rb")
    except OSError as error:
        raise Damaged(f"{MANIFEST}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Damaged("it is being deleted") from None
        except OSError:
            pass
        yield


def prune(checkpoints: Path, keep_last: int, keep_every: int | None) -> None:
    """Delete all but the newest complete ones, those at multiples of keep_every, and those in use.

    Raises:
        OSError: one cannot be deleted.
    """
    complete = [path for path in candidates(checkpoints) if (path / MANIFEST).exists()]
    for path in complete[keep_last:]:
        if keep_every is None or step_of(path) % keep_every:
            _delete_unless_read(path)


def _delete_unless_read(checkpoint: Path) -> None:
    with (checkpoint / MANIFEST).open("r+b") as file:  # an exclusive lock over NFS needs writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            pass
        deleted = checkpoint.with_name(DELETED + checkpoint.name)
        checkpoint.rename(deleted)  # never half a checkpoint under a complete one's name
        shutil.rmtree(deleted)


def sweep(checkpoints: Path) -> None:
    """Remove what crashes have left: nothing that was ever complete, but for retention's own."""
    for prefix in (UNFINISHED, DELETED, UNIVERSAL):
        for path in checkpoints.glob(f"{prefix}step-*"):
            shutil.rmtree(path)


def set_aside(checkpoint: Path) -> Path:
    """Take a damaged checkpoint out of the way of the run that goes on without it."""
    aside = checkpoint.with_name(DAMAGED + checkpoint.name)
    if aside.exists():
        shutil.rmtree(aside)
    checkpoint.rename(aside)
    return aside


def begin_anew(run_folder: Path) -> Path | None:
    """Move a run's files into a folder of their own; None where there are none.

    What it started from stays. Its checkpoints and its config go last: cut off in between, the run
    is resumed, not mixed.
    """
    last = {"checkpoints": 1, "config.json": 2}
    entries = [
        path
        for path in run_folder.iterdir()
        if path.name not in (INITIAL, "logs")  # logs: being written
        and not path.name.startswith("before-restart-")
    ]
    if not entries:
        return None
    numbers = [int(path.name.rpartition("-")[2]) for path in run_folder.glob("before-restart-*")]
    aside = run_folder / f"before-restart-{max(numbers, default=0) + 1}"
    aside.mkdir()
    for path in sorted(entries, key=lambda path: last.get(path.name, 0)):
        path.rename(aside / path.name)
    return aside


def forbid_world_writing() -> None:
    """For every file this process makes from here on, whatever the umask it was started with."""
    os.umask(os.umask(0o077) | 0o002)


def close_to_the_world(folder: Path) -> None:
    """Take the right to write from everyone else. Left as it is where it is not ours to change."""
    mode = folder.stat().st_mode
    if mode & 0o002:
        with suppress(PermissionError):
            folder.chmod(mode & 0o7775)


def as_json(value: Any) -> Any:
    """The value as JSON gives it back: tuples are lists, keys are strings."""
    return json.loads(json.dumps(value))
