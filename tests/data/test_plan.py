from __future__ import annotations

from dataclasses import replace

import pytest

from data.plan import Job, Plan, make_plan
from data.sources import Chunk, Reading


def test_small_files_are_done_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.plan._JOB_BYTES", 100)
    monkeypatch.setattr("data.plan._JOB_CHUNKS", 4)
    file = Chunk(0, "text", "x", 0, 0, 0)
    sizes = [60, 40, 1, 500, 99, 2, 0, 0, 0, 0, 0, 0]
    chunks = [replace(file, path=str(i), stop=size, size=size) for i, size in enumerate(sizes)]
    jobs = list(Plan(tuple(chunks), (), "").jobs())
    assert [[chunk.size for chunk in job.chunks] for job in jobs] == [
        [60, 40], [1], [500], [99], [2, 0, 0, 0], [0, 0, 0],
    ]  # fmt: skip
    assert [job.number for job in jobs] == list(range(6))
    assert (str(jobs[0]), str(jobs[1])) == ("0 to 1", "2")
    assert str(Job(0, (replace(file, others=("y", "z")),))) == "x to z"
    lines = replace(file, reader="json_lines", start=4000, stop=8000, size=4000)
    assert str(Job(0, (lines,))) == "x, bytes 4,000 to 8,000"


def test_parts_of_a_streamed_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their sizes are not known: work and shards go by their number.
    shards = [Chunk(0, "datasets", "hf:x", i, i + 1, 0) for i in range(6)]
    monkeypatch.setattr("data.plan.plan_chunks", lambda *_: shards)
    reading = Reading(("hf:x",), streaming=True)
    assert len(list(make_plan(reading, None).jobs())) == 6
    for number in range(3):
        part = make_plan(reading, (number, 3))
        assert [chunk.start for chunk in part.chunks] == [2 * number, 2 * number + 1]
    assert str(Job(0, (shards[3],))) == "hf:x, shards 3 to 4"
