from __future__ import annotations

import random
from pathlib import Path

import pytest

import data.deduplicate
from data.deduplicate import FOLDER, Duplicates, find_duplicates
from data.partial import PartialFolder


@pytest.mark.parametrize("kinds", [1, 40, 400, 10_000])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_all_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: int, size: int
) -> None:
    # Many partitions, blocks and ranges.
    monkeypatch.setattr(data.deduplicate, "_PARTITION_DOCUMENTS", 50)
    monkeypatch.setattr(data.deduplicate, "_RANGE_DOCUMENTS", 33)
    monkeypatch.setattr(data.deduplicate, "_BLOCK_BYTES", 16 * 70)
    choice = random.Random(0)
    values = [choice.randbytes(8) * 2 for _ in range(kinds)]
    # Equal in either half is not equal.
    for number in range(1, kinds):
        if choice.random() < 0.4:
            first, second = choice.sample([values[0], values[number]], 2)
            values[number] = first[:8] + second[8:]
    hashes = [choice.choice(values) for _ in range(size)]
    cuts = sorted(choice.choices(range(size + 1), k=9))
    paths = []
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, size], strict=True)):
        paths.append(tmp_path / f"{number}.hashes")
        paths[-1].write_bytes(b"".join(hashes[start:stop]))
    seen: set[bytes] = set()
    expected = [value in seen or seen.add(value) is not None for value in hashes]
    with PartialFolder(tmp_path / "out") as folder:
        find_duplicates(folder, {"train": paths})
        duplicates = Duplicates(folder.path / FOLDER / "train")
        assert duplicates(0, size).tolist() == expected
        found = [mark for i in range(0, size, 7) for mark in duplicates(i, min(size, i + 7))]
        assert found == expected
        names = [path.name for path in (folder.path / FOLDER / "train").iterdir()]
        assert not any(name.startswith("hash") for name in names)
