"""The work that makes a corpus of its sources: chunks, and which of them are done together."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.manifest import Inputs, ShardRecord, SourceRecord
from data.partial import PartialFolder
from data.sources import Chunk, Reading, plan_chunks

PLAN = "plan.jsonl"

# On disk. Large enough that handing over a chunk costs nothing, small enough that the workers end
# at about the same time and little is done again after a crash.
CHUNK_BYTES = 1 << 24

# Small files are done together up to this size, and this number.
_JOB_BYTES = 1 << 21
_JOB_CHUNKS = 4096


@dataclass(frozen=True)
class Job:
    """Chunks that follow one another, done by one worker."""

    number: int
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes on disk, for progress."""
        return sum(map(_weight, self.chunks))

    def __str__(self) -> str:
        first, last = self.chunks[0], self.chunks[-1]
        if len(self.chunks) == 1:
            return describe(first)
        return f"{first.path} to {(last.path, *last.others)[-1]}"


def describe(chunk: Chunk) -> str:
    if chunk.others:
        return f"{chunk.path} to {chunk.others[-1]}"
    if chunk.reader == "text" or (chunk.start, chunk.stop) == (0, chunk.size):
        return chunk.path
    units = {"json_lines": "bytes", "parquet": "row groups", "arrow": "record batches"}
    unit = units.get(chunk.reader, "rows" if chunk.size else "shards")
    return f"{chunk.path}, {unit} {chunk.start:,} to {chunk.stop:,}"


@dataclass(frozen=True)
class Plan:
    """The chunks of a corpus, or of one shard of it."""

    chunks: tuple[Chunk, ...]
    sources: tuple[SourceRecord, ...]
    """Of the whole corpus."""
    digest: str
    """Checksum of the chunks of the whole corpus."""

    def jobs(self) -> Iterator[Job]:
        numbers = itertools.count()
        together: list[Chunk] = []
        size = 0
        for chunk in self.chunks:
            weight = _weight(chunk)
            if together and (size + weight > _JOB_BYTES or len(together) == _JOB_CHUNKS):
                yield Job(next(numbers), tuple(together))
                together, size = [], 0
            together.append(chunk)
            size += weight
        if together:
            yield Job(next(numbers), tuple(together))


def make_plan(reading: Reading, shard: tuple[int, int] | None) -> Plan:
    """The plan of one shard (number, count), or of all. It depends on the sources alone.

    Raises ValueError or OSError if a source matches nothing or is unreadable.
    """
    chunks = plan_chunks(reading, CHUNK_BYTES)
    digest = hashlib.sha256()
    files, sizes = [0] * len(reading.sources), [0] * len(reading.sources)
    place = (-1, "")
    for chunk in chunks:
        digest.update(json.dumps(dataclasses.astuple(chunk)).encode() + b"\n")
        files[chunk.source] += ((chunk.source, chunk.path) != place) + len(chunk.others)
        sizes[chunk.source] += chunk.size
        place = (chunk.source, chunk.path)
    sources = tuple(
        SourceRecord(source=source, files=files[number], bytes=sizes[number])
        for number, source in enumerate(reading.sources)
    )
    if shard is not None:
        chunks = list(_shard(chunks, *shard))
    return Plan(tuple(chunks), sources, digest.hexdigest())


def _shard(chunks: list[Chunk], number: int, count: int) -> Iterator[Chunk]:
    """The chunks whose middle lies within the shard's share of all bytes."""
    total = sum(map(_weight, chunks))
    start = 0
    for chunk in chunks:
        middle = 2 * start + _weight(chunk)
        if min(count - 1, middle * count // max(1, 2 * total)) == number:
            yield chunk
        start += _weight(chunk)


def _weight(chunk: Chunk) -> int:
    """Its bytes; what is not known, as of a streamed dataset, is worth a job of its own."""
    return _JOB_BYTES if chunk.reader == "datasets" and chunk.size == 0 else chunk.size


def plan_lines(plan: Plan, inputs: Inputs, shard: ShardRecord | None) -> Iterator[str]:
    """What a partial folder keeps of its plan: the options, then each chunk and the size and the
    time of change of its file."""
    options = {"inputs": inputs.model_dump(mode="json")}
    options["shard"] = shard.model_dump(mode="json") if shard else None  # type: ignore[assignment]
    yield json.dumps(options)
    path, stamp = "", (0, 0)
    for chunk in plan.chunks:
        if chunk.path != path:
            path, stamp = chunk.path, _stamp(chunk.path)
        stamps = [stamp, *map(_stamp, chunk.others)]
        yield json.dumps({**dataclasses.asdict(chunk), "stamps": stamps})


def changed_file(lines: Iterable[str]) -> str | None:
    """The first file that is no longer what it was when plan_lines() saw it."""
    seen = ""
    for line in itertools.islice(lines, 1, None):
        chunk = json.loads(line)
        for path, stamp in zip((chunk["path"], *chunk["others"]), chunk["stamps"], strict=True):
            if path != seen and tuple(stamp) != _stamp(path):
                return str(path)
            seen = path
    return None


def agree_on_plan(folder: PartialFolder, lines: Callable[[], Iterator[str]]) -> None:
    """Keeps the plan in the folder. Raises ValueError if it has the plan of other work."""
    path = folder.path / PLAN
    if path.exists():
        with path.open() as kept:
            difference = _difference(kept, lines())
        if difference is not None:
            raise ValueError(
                f"{folder.path} holds the work of another call: {difference}; remove it or choose "
                "another --output"
            )
    folder.write(PLAN, (line.encode() + b"\n" for line in lines()))


def _difference(kept: Iterable[str], wanted: Iterable[str]) -> str | None:
    """How the plan that was kept differs from the one wanted, in words; None if it does not.

    A run may be continued with --skip-invalid that was begun without: what it has done holds no
    invalid document.
    """
    kept, wanted = iter(kept), iter(wanted)
    before, now = json.loads(next(kept)), json.loads(next(wanted))
    if not before["inputs"]["skip_invalid"]:
        now["inputs"]["skip_invalid"] = False
    before, now = ({**options, **options["inputs"], "inputs": None} for options in (before, now))
    for key in {**now, **before}:
        if before.get(key) != now.get(key):
            return f"its {key} is {before.get(key)}, not {now.get(key)}"
    for old, new in itertools.zip_longest(kept, wanted):
        if old is None or new is None or json.loads(old) != json.loads(new):
            return f"the sources have changed since, from {json.loads(old or new)['path']} on"
    return None


def _stamp(path: str) -> tuple[int, int]:
    """(bytes, time of change in ns); zeros for what is no file, such as a dataset's name."""
    try:
        found = os.stat(Path(path))
    except FileNotFoundError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)
