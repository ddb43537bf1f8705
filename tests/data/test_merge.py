"""Shards, and the command that joins them."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.plan import make_plan
from data.sources import Reading, read_documents
from data.token_file import TokenFile
from data.tokenizer import Tokenizer

SmallSteps = Any


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def shards(small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path) -> Any:
    def make(*options: str, count: int = 3) -> list[Path]:
        folders = [tmp_path / f"shard-{number}" for number in range(count)]
        for number, folder in enumerate(folders):
            shard = ("--skip-invalid", "--shard", f"{number}/{count}", *options)
            small_steps.run(small_steps.prepare(mixed_sources, folder, *shard))
        return folders

    return make


def test_shards_cover_the_plan_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.plan.CHUNK_BYTES", 100)
    for name, size in (("a", 1000), ("b", 5000), ("c", 50)):
        (tmp_path / f"{name}.jsonl").write_text("x" * size)
    reading = Reading((str(tmp_path),))
    whole = make_plan(reading, None)
    assert sum(chunk.size for chunk in whole.chunks) == 6050
    for count in (1, 2, 7, 200):
        parts = [make_plan(reading, (number, count)) for number in range(count)]
        assert sum((part.chunks for part in parts), ()) == whole.chunks
        assert {part.digest for part in parts} == {whole.digest}
        assert all(part.sources == whole.sources for part in parts)
        # Of a share, no shard is off by more than the chunk at either end.
        sizes = [sum(chunk.size for chunk in part.chunks) for part in parts]
        assert all(abs(size - 6050 / count) <= 100 for size in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--deduplicate"]])
def test_merged_shards_are_one_run(
    small_steps: SmallSteps,
    shards: Any,
    mixed_sources: list[Path],
    tokenizer: Tokenizer,
    tmp_path: Path,
    options: list[str],
) -> None:
    one = tmp_path / "one"
    small_steps.run(small_steps.prepare(mixed_sources, one, "--skip-invalid", *options))
    folders = shards(*options)
    for folder in folders:  # a corpus like any other
        assert TokenFile(folder / "train").manifest is not None
        assert TokenFile(folder / "train").document_count > 0
    merged = tmp_path / "merged"
    small_steps.run(small_steps.merge(folders[::-1], merged))
    assert files(merged) == files(one)

    skipped: list[ValueError] = []
    reading = Reading(tuple(map(str, mixed_sources)))
    texts = [text for text in read_documents(reading, skipped.append) if text]
    kept = list(dict.fromkeys(texts)) if options else texts
    assert len(set(texts)) < len(texts)
    found = [
        [tokenizer.decode(file.document(i)[:-1].tolist()) for i in range(file.document_count)]
        for file in (TokenFile(merged / "train"), TokenFile(merged / "validation"))
    ]
    assert sorted(found[0] + found[1]) == sorted(kept)
    assert all(found)
    for texts_of_split in found:  # in their order
        assert texts_of_split == [text for text in kept if text in set(texts_of_split)]
    manifest = json.loads((merged / "manifest.json").read_text())
    assert manifest["skipped"]["duplicate"] == len(texts) - len(kept)
    assert manifest["skipped"]["invalid"] == len(skipped) == 4
    assert len((merged / "invalid.txt").read_text().splitlines()) == 4


@pytest.mark.slow
def test_merge_killed_at_any_step(small_steps: SmallSteps, shards: Any, tmp_path: Path) -> None:
    folders = shards("--deduplicate")
    count = small_steps.steps(small_steps.merge(folders, tmp_path / "expected"))
    whole = files(tmp_path / "expected")
    for step in (*(count * i // 5 for i in range(1, 5)), count - 2):
        output = tmp_path / f"out-{step}"
        small_steps.run(small_steps.merge(folders, output, step=step), code=-signal.SIGKILL)
        small_steps.run(small_steps.merge(folders, output))
        assert files(output) == whole, f"step {step} of {count}"
        assert not output.with_name(f"{output.name}.partial").exists()


@pytest.mark.slow
def test_shards_that_do_not_fit(
    small_steps: SmallSteps, shards: Any, mixed_sources: list[Path], tmp_path: Path
) -> None:
    folders = shards()

    def refused(parts: list[Path]) -> str:
        message = small_steps.run(small_steps.merge(parts, tmp_path / "out"), code=2)
        assert message.startswith("error: ")
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.partial").exists() or "goes on from it" in message
        return str(message)

    assert "of 3 shards these are missing: 0, 2" in refused(folders[1:2])
    assert "are both shard 1" in refused([*folders, folders[1]])
    assert "nowhere holds no prepared corpus" in refused([*folders, tmp_path / "nowhere"])

    other = tmp_path / "other"
    whole = small_steps.prepare(mixed_sources, other, "--skip-invalid")
    small_steps.run(whole)
    assert "other is no shard" in refused([*folders, other])
    shutil.rmtree(other)

    def alone(*options: str) -> None:
        shutil.rmtree(other, ignore_errors=True)
        small_steps.run(small_steps.prepare(mixed_sources, other, "--skip-invalid", *options))

    alone("--shard", "2/3", "--deduplicate")
    assert "do not fit: its deduplicate is True, not False" in refused([*folders[:2], other])
    alone("--shard", "2/4")
    assert "other is one of 4 shards" in refused([*folders[:2], other])

    for name in ("train.bin", "validation.idx"):
        damaged = folders[2] / name
        content = damaged.read_bytes()
        position = len(content) // 2
        flipped = np.frombuffer(content, np.uint8).copy()
        flipped[position] ^= 1
        damaged.write_bytes(flipped.tobytes())
        assert f"{damaged}: its checksum is not the manifest's" in refused(folders)
        damaged.write_bytes(content)
    small_steps.run(small_steps.merge(folders, tmp_path / "out"))
