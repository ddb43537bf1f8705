"""Saving with an engine that is no more than its states; what a search then finds."""

from __future__ import annotations

import errno
import hashlib
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
from training import checkpoint, store
from training.checkpoint import NoCheckpoint, Progress, Search, verify_alone
from training.engine import Ranks
from training.pulse import Pulse
from training.saver import SaveFailed, Saver
from training.setup import Run
from training.unpickling import load_states
from training.writer import Staging, write_states


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Engine:
    """What Saver needs of DeepSpeed's engine."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(300, 200)
        self.checkpoint_engine: Any = None

    def zero_optimization_stage(self) -> int:
        return 0

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        self.checkpoint_engine.create(None)
        states = {"module": self.module.state_dict(), "step": 3}
        self.checkpoint_engine.save(states, f"{folder}/{tag}/states.pt")
        self.checkpoint_engine.commit(None)


@pytest.fixture
def new_saver(altered: Callable[..., Any]) -> Callable[..., Saver]:
    def make(**settings: Any) -> Saver:
        changes = {f"training.{key}": value for key, value in settings.items()}
        config = RunConfig.model_validate(altered(changes))
        ranks = Ranks(0, 0, 1, 1, torch.device("cpu"))
        unused: Any = None
        run = Run(config, config, {}, (), ranks, unused, unused, at(0), None)
        return Saver(Engine(), run, Pulse())

    return make


def at(step: int) -> Progress:
    return Progress(step, 8 * step, "data", 1)


def names(saver: Saver) -> set[str]:
    return {path.name for path in saver.checkpoints.iterdir()}


@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_saved_is_the_state_at_the_call(
    new_saver: Callable[..., Saver], in_background: bool
) -> None:
    saver = new_saver(save_in_background=in_background)
    weight = saver.engine.module.weight
    with torch.no_grad():
        weight.fill_(1.0)
        saver.save(at(1))
        weight.fill_(2.0)
    saver.close()
    folder = saver.checkpoints / "step-00000001"
    assert load_states(folder / "states.pt")["module"]["weight"].unique().tolist() == [1.0]
    assert names(saver) == {"latest", "step-00000001"}
    assert verify_alone(folder, saver.run.config) is None
    assert store.read_manifest(folder).progress == vars(at(1))


def test_the_last_ones_are_kept_while_training(new_saver: Callable[..., Saver]) -> None:
    saver = new_saver(keep_last=2, save_interval=1, keep_every=3)
    for step in range(1, 8):
        saver.save(at(step))
    saver.close()
    assert names(saver) == {"latest", *(f"step-0000000{step}" for step in (3, 6, 7))}


def test_a_save_waits_for_the_one_before(
    new_saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its copies would be overwritten while they are written."""
    saver = new_saver()
    release, write = threading.Event(), saver.writer.write

    def slowly() -> Any:
        release.wait()
        return write()

    monkeypatch.setattr(saver.writer, "write", slowly)
    saver.save(at(1))
    saver.poll()
    assert names(saver) == {"unfinished-step-00000001"}
    threading.Timer(0.2, release.set).start()
    saver.save(at(2))
    assert "step-00000001" in names(saver)
    saver.close()
    assert "step-00000002" in names(saver)


@pytest.fixture
def limit() -> Iterator[Callable[[bool], None]]:
    """No file may grow beyond 50,000 bytes: what a full disk looks like to a program."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda on: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000 if on else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("in_background", [True, False])
def test_a_failed_save_is_reported_and_the_next_one_tried(
    new_saver: Callable[..., Saver],
    limit: Callable[[bool], None],
    in_background: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saver = new_saver(save_in_background=in_background)
    saver.save(at(1))
    saver.settle()
    limit(True)
    saver.save(at(2))
    saver.settle()
    printed = capsys.readouterr().out
    assert "save at step 2 failed" in printed
    assert "File too large" in printed
    assert "states.pt" in printed
    assert "newest complete: step-00000001" in printed
    assert names(saver) == {"latest", "step-00000001"}
    assert verify_alone(saver.checkpoints / "step-00000001", saver.run.config) is None
    limit(False)
    saver.save(at(3))
    saver.close()
    assert names(saver) == {"latest", "step-00000001", "step-00000003"}


@pytest.mark.parametrize("in_background", [True, False])
def test_a_failed_save_stops_the_run_that_asks_for_it(
    new_saver: Callable[..., Saver], limit: Callable[[bool], None], in_background: bool
) -> None:
    limit(True)
    saver = new_saver(on_failed_save="stop", save_in_background=in_background)

    def save() -> None:
        saver.save(at(1))
        saver.settle()

    with pytest.raises(SaveFailed, match=r"step 1 failed.*File too large"):
        save()
    assert names(saver) == set()


def test_the_last_save_must_succeed_and_is_tried_twice(
    new_saver: Callable[..., Saver],
    limit: Callable[[bool], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit(True)
    saver = new_saver()
    saver.save(at(9))
    with pytest.raises(SaveFailed, match="step 9 is not saved"):
        saver.close()
    assert capsys.readouterr().out.count("save at step 9 failed") == 2


def test_no_save_begins_that_does_not_fit(
    new_saver: Callable[..., Saver],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The weights are 300 x 200 + 200 float32 numbers."""
    saver, size = new_saver(), 4 * (300 * 200 + 200)
    monkeypatch.setattr(saver.writer, "write", lambda: pytest.fail("it began"))
    monkeypatch.setattr("training.saver.shutil.disk_usage", lambda _: SimpleNamespace(free=size))
    saver.save(at(1))
    saver.settle()
    assert saver.writer.size() == size
    assert "needed, 235.16 KiB free" in capsys.readouterr().out
    assert names(saver) == set()


def test_a_file_system_that_does_not_tell_its_room_is_a_failed_save(
    new_saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised on rank 0 alone, the error would leave the others waiting."""

    def dead(_: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", "/run")

    monkeypatch.setattr("training.saver.shutil.disk_usage", dead)
    saver = new_saver(on_failed_save="stop")
    with pytest.raises(SaveFailed, match=r"rank 0: .*Stale file handle: '/run'.*run the same comm"):
        saver.save(at(1))


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_an_old_checkpoint_that_cannot_be_deleted(
    new_saver: Callable[..., Saver],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: str,
) -> None:
    def fail(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(store.shutil, "rmtree", fail)
    saver = new_saver(keep_last=1, save_interval=1, on_failed_save=policy)
    saver.save(at(1))
    saver.save(at(2))
    if policy == "stop":
        with pytest.raises(SaveFailed, match=r"rank 0: .*not permitted: '.*deleted-step-00000001"):
            saver.close()
    else:
        saver.close()
        assert "deleted-step-00000001" in capsys.readouterr().out
    assert verify_alone(saver.checkpoints / "step-00000002", saver.run.config) is None


def test_an_error_of_ours_is_not_taken_for_trouble_with_the_disk(
    new_saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = new_saver()
    monkeypatch.setattr(saver.writer, "write", lambda: 1 / 0)
    saver.save(at(1))
    with pytest.raises(ZeroDivisionError):
        saver.settle()


def test_copies_share_what_the_originals_share_and_use_the_same_memory_again() -> None:
    flat = torch.arange(12, dtype=torch.bfloat16)
    state = {
        "flat": flat,
        "view": flat[4:8].view(2, 2),
        "scalar": torch.tensor(3),
        "same": [flat],
        "empty": torch.empty(0),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "step": (1, "text", None),
    }
    staging = Staging()
    first = staging.copy(state)
    flat[5] = 100
    assert first["view"].tolist() == [[4, 5], [6, 7]]
    assert first["view"].untyped_storage().data_ptr() == first["flat"].data_ptr()
    assert first["same"][0] is first["flat"]
    assert first["flat"].dtype == torch.bfloat16
    assert type(first["parameter"]) is torch.nn.Parameter
    assert first["step"] == state["step"]
    staging.rewind()
    second = staging.copy(state)
    assert second["flat"].data_ptr() == first["flat"].data_ptr()
    assert second["view"][0, 1] == 100


def test_a_file_in_the_background_is_the_file_in_the_foreground(tmp_path: Path) -> None:
    flat = torch.randn(1000)
    state = {"weights": flat[:900], "tied": flat[:900], "tail": flat[900:], "lr": 0.1}
    written = write_states(state, tmp_path / "direct")
    copied = write_states(Staging().copy(state), tmp_path / "copied")
    data = (tmp_path / "direct").read_bytes()
    assert data == (tmp_path / "copied").read_bytes()
    assert written == copied
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    assert written.bytes == len(data)
    assert len(data) < 4 * 1000 + 2000, "what is shared is written once"


# What a run finds when it starts.


def search(saver: Saver) -> Search:
    found = Search(saver.checkpoints.parent)
    found.run(saver.run.config, verify_alone)
    return found


@pytest.fixture
def two(new_saver: Callable[..., Saver]) -> Saver:
    """A run with checkpoints at steps 1 and 2."""
    saver = new_saver()
    for step in (1, 2):
        saver.save(at(step))
    saver.close()
    return saver


@pytest.mark.parametrize(
    ("pointer", "warning"),
    [
        ("step-00000002", None),
        (" step-00000002\n", None),
        ("", "latest is empty"),
        (None, "latest is missing"),
        ("step-00000099", "latest names 'step-00000099', which is not there"),
        ("step-00000001", "latest names 'step-00000001', which is not the newest"),
        ("../../other/checkpoints/step-00000001", "which is not there"),
    ],
)
def test_the_newest_complete_one_is_used_whatever_latest_says(
    two: Saver, pointer: str | None, warning: str | None
) -> None:
    latest = two.checkpoints / "latest"
    latest.unlink() if pointer is None else latest.write_text(pointer)
    found = search(two)
    assert found.found == two.checkpoints / "step-00000002"
    lines = found.warnings()
    assert len(lines) == (warning is not None)
    assert warning is None or warning in lines[0]


def test_damaged_newer_ones_are_named_and_the_one_before_is_used(two: Saver) -> None:
    (two.checkpoints / "step-00000003").mkdir()
    (two.checkpoints / "step-00000002" / "states.pt").write_bytes(b"")
    found = search(two)
    assert found.found == two.checkpoints / "step-00000001"
    assert found.warnings() == [
        f"{two.checkpoints}/step-00000003 is not used: manifest.json: missing: the checkpoint is "
        "not complete",
        f"{two.checkpoints}/step-00000002 is not used: states.pt: empty, expected "
        f"{store.read_manifest(two.checkpoints / 'step-00000002').files['states.pt'].bytes:,} "
        "bytes",
    ]


def test_a_checkpoint_of_another_run_is_not_used(two: Saver) -> None:
    config = two.run.config
    other = config.model_copy(update={"training": config.training.model_copy(update={"seed": 5})})
    two.run = replace(two.run, asked=other)
    two.save(at(3))
    two.close()
    found = search(two)
    assert found.found == two.checkpoints / "step-00000002"
    assert "of another run: training.seed: the run has 5, the config 1234" in found.warnings()[0]


@pytest.mark.parametrize("left", ["damaged", "set aside", "pointer"])
def test_without_a_complete_one_the_run_does_not_start_over(two: Saver, left: str) -> None:
    for path in store.candidates(two.checkpoints):
        (path / "states.pt").unlink()
        if left != "damaged":
            store.set_aside(path)
    if left == "pointer":
        for path in two.checkpoints.glob("damaged-*"):
            path.rename(two.checkpoints.parent / path.name)
    before = sorted(two.checkpoints.rglob("*"))
    with pytest.raises(NoCheckpoint, match="--restart"):
        search(two)
    assert sorted(two.checkpoints.rglob("*")) == before


def test_a_first_save_that_was_cut_off_is_no_checkpoint(new_saver: Callable[..., Saver]) -> None:
    saver = new_saver()
    (saver.checkpoints / "unfinished-step-00000001").mkdir(parents=True)
    assert search(saver).found is None
    ranks = saver.run.ranks
    assert checkpoint.find_together(saver.run.config, ranks).found is None
    assert names(saver) == set()


def test_damaged_ones_are_put_aside_for_good(
    two: Saver, capsys: pytest.CaptureFixture[str]
) -> None:
    (two.checkpoints / "step-00000002" / "states.pt").unlink()
    found = checkpoint.find_together(two.run.config, two.run.ranks)
    assert found.found == two.checkpoints / "step-00000001"
    assert "step-00000002 is now damaged-step-00000002" in capsys.readouterr().out
    assert names(two) == {"latest", "step-00000001", "damaged-step-00000002"}
    two.save(at(2))
    two.close()
    assert search(two).found == two.checkpoints / "step-00000002"
