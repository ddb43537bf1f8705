"""Checkpoint folders without tensors: damage, order, retention, permissions."""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training import store

FILES = {"model.pt": b"weights" * 50, "optimizer.pt": b"moments" * 70, "sub/swap.bin": b"x" * 9}


def make(checkpoints: Path, step: int, files: dict[str, bytes] = FILES) -> Path:
    folder = checkpoints / f"step-{step:08}"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    manifest = store.Manifest(
        progress={"step": step},
        zero_stage=2,
        tensor_parallel=1,
        precision="float32",
        versions={},
        config={},
        deepspeed={},
        files={
            name: store.Written(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in files.items()
        },
    )
    store.write_manifest(folder, manifest)
    return folder


def check(checkpoint: Path) -> None:
    store.verify(checkpoint, store.read_manifest(checkpoint))


def flip(path: Path, bit: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "expected"),
    "emptied": (lambda path: os.truncate(path, 0), "empty, expected"),
    "deleted": (lambda path: path.unlink(), "missing"),
    "one bit flipped": (lambda path: flip(path, 8 * (path.stat().st_size - 1)), "checksum"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, store.MANIFEST])
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, name: str, kind: str) -> None:
    checkpoint = make(tmp_path, 1)
    check(checkpoint)
    damage, expected = DAMAGE[kind]
    damage(checkpoint / name)
    expected = expected if name != store.MANIFEST or kind == "deleted" else "checksum"
    with pytest.raises(store.Damaged, match=f"^{name}: .*{expected}"):
        check(checkpoint)


def test_any_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1, {"model.pt": b"weights"})
    path = checkpoint / store.MANIFEST
    for bit in range(0, 8 * path.stat().st_size, 13):
        flip(path, bit)
        with pytest.raises(store.Damaged):
            check(checkpoint)
        flip(path, bit)
    check(checkpoint)


def test_ranks_share_the_verification_and_miss_no_file(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    manifest = store.read_manifest(checkpoint)
    for name in FILES:
        flip(checkpoint / name, 3)
        found = []
        for rank in range(2):
            try:
                store.verify(checkpoint, manifest, rank=rank, ranks=2)
            except store.Damaged as error:
                found.append(str(error))
        assert len(found) == 1, "one rank reads each file"
        assert found[0].startswith(name)
        flip(checkpoint / name, 3)


def test_a_manifest_that_points_outside_is_refused(tmp_path: Path) -> None:
    for name in ("../other", "/etc/passwd"):
        with pytest.raises(ValueError, match="not a path within"):
            store.Manifest.model_validate(
                {
                    **store.read_manifest(make(tmp_path, 1)).model_dump(),
                    "files": {name: {"bytes": 1, "sha256": ""}},
                }
            )


def test_newest_first_by_number(tmp_path: Path) -> None:
    for step in (5, 100_000_000, 20, 99_999_999):
        make(tmp_path, step)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "unfinished-step-00000030").mkdir()
    found = [store.step_of(path) for path in store.candidates(tmp_path)]
    assert found == [100_000_000, 99_999_999, 20, 5]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (1, None, {70}),
        (3, None, {50, 60, 70}),
        (9, None, {10, 20, 30, 40, 50, 60, 70}),
        (1, 20, {20, 40, 60, 70}),
        (2, 70, {60, 70}),
    ],
)
def test_retention(tmp_path: Path, keep_last: int, keep_every: int | None, left: set[int]) -> None:
    for step in range(10, 71, 10):
        make(tmp_path, step)
    (tmp_path / "step-00000080").mkdir()  # without a manifest it does not count as kept
    store.prune(tmp_path, keep_last, keep_every)
    assert {store.step_of(path) for path in store.candidates(tmp_path)} == left | {80}


def test_a_checkpoint_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    old = make(tmp_path, 1)
    make(tmp_path, 2)
    with store.reading(old):
        store.prune(tmp_path, 1, None)
        check(old)
    store.prune(tmp_path, 1, None)
    assert not old.exists()


def test_a_checkpoint_that_is_being_deleted_is_not_read(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    with (checkpoint / store.MANIFEST).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(store.Damaged, match="being deleted"), store.reading(checkpoint):
            pass


def test_sweeping_leaves_what_is_complete(tmp_path: Path) -> None:
    kept = make(tmp_path, 1)
    store.set_aside(make(tmp_path, 4))
    for prefix in (store.UNFINISHED, store.DELETED):
        make(tmp_path, 2).rename(tmp_path / f"{prefix}step-00000002")
    store.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, "damaged-step-00000004"}


def test_completing_replaces_nothing(tmp_path: Path) -> None:
    folder = make(tmp_path, 3).rename(tmp_path / "unfinished-step-00000003")
    manifest = store.read_manifest(folder)
    assert store.complete(folder, manifest) == tmp_path / "step-00000003"
    assert (tmp_path / "latest").read_text() == "step-00000003"
    folder = make(tmp_path, 4).rename(folder)
    with pytest.raises(FileExistsError, match="step-00000003: is there already"):
        store.complete(folder, manifest)
    check(tmp_path / "step-00000003")


def test_a_checkpoint_gets_its_name_when_latest_can_no_longer_fail(tmp_path: Path) -> None:
    folder = make(tmp_path, 3).rename(tmp_path / "unfinished-step-00000003")
    (tmp_path / "latest.tmp").mkdir()  # where it is written first
    with pytest.raises(IsADirectoryError):
        store.complete(folder, store.read_manifest(folder))
    assert store.candidates(tmp_path) == []


def test_a_file_without_room_is_named_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    store.write_durably(path, "step-1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}.tmp'"):
            store.write_durably(path, "step-2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "step-1"
    assert os.listdir(tmp_path) == ["latest"]


def test_beginning_anew_keeps_everything(tmp_path: Path) -> None:
    assert store.begin_anew(tmp_path) is None
    for number in (1, 2):
        make(tmp_path / "checkpoints", number)
        for name in ("config.json", "metrics.jsonl"):
            (tmp_path / name).write_text(str(number))
        assert store.begin_anew(tmp_path) == tmp_path / f"before-restart-{number}"
    assert {path.name for path in tmp_path.iterdir()} == {"before-restart-1", "before-restart-2"}
    check(tmp_path / "before-restart-1" / "checkpoints" / "step-00000001")
    assert (tmp_path / "before-restart-2" / "metrics.jsonl").read_text() == "2"


def test_nothing_is_writable_by_the_world(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    given.chmod(0o777)
    before = os.umask(0)
    try:
        store.forbid_world_writing()
        store.close_to_the_world(given)
        made = make(tmp_path / "made", 1)
    finally:
        os.umask(before)
    for path in (given, made, *made.rglob("*")):
        assert not path.stat().st_mode & 0o002, path
