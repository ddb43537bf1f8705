"""Command: joins the shards of a corpus.

    python -m data.merge --output corpus shards/*

The shards are what `python -m data.prepare --shard i/n` wrote, in any order. The result is the same
as that of one call without --shard, to the byte. Checksums are checked on the way; nothing of a
shard's size is read into memory. A call that was killed goes on with the shard it was at.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from data.deduplicate import FOLDER as DUPLICATES
from data.deduplicate import Duplicates, find_duplicates
from data.files import BLOCK_BYTES
from data.manifest import MANIFEST_NAME, TRAIN, FileRecord, Inputs, Manifest, read_manifest
from data.output import INVALID, SCRATCH, CorpusOutput, Part, PartSplit
from data.partial import PartialFolder, Unfinished, UselessError, run_command
from data.plan import PLAN, agree_on_plan
from data.prepared import check_splits, difference, find_prepared, print_report, refuse_other
from data.token_file import LENGTHS_OFFSET


@dataclass(frozen=True)
class Shard:
    folder: Path
    manifest: Manifest

    @property
    def number(self) -> int:
        assert self.manifest.shard is not None
        return self.manifest.shard.number

    @property
    def part(self) -> Part:
        splits = {
            name: PartSplit(
                bin=self.folder / f"{name}.bin",
                lengths=self.folder / f"{name}.idx",
                lengths_offset=LENGTHS_OFFSET,
                documents=split.documents,
                hashes=None,
                sha256=split.bin.sha256,
            )
            for name, split in self.manifest.splits.items()
        }
        manifest = self.manifest
        return Part(splits, self.folder / INVALID, manifest.skipped, manifest.unknown_tokens)

    def check_small_files(self) -> None:
        """Compares the indices and the hashes with the manifest's checksums."""
        for name, split in self.manifest.splits.items():
            _check(self.folder / f"{name}.idx", split.idx)
            if split.hashes is not None:
                _check(self.folder / f"{name}.hashes", split.hashes)


def _check(path: Path, record: FileRecord) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() != record.sha256:
        raise ValueError(f"{path}: its checksum is not the manifest's: damaged")


def read_shards(folders: list[Path]) -> list[Shard]:
    """The shards in the order of their numbers.

    Raises ValueError if they are not all the shards of one corpus, each once.
    """
    shards: dict[int, Shard] = {}
    for folder in folders:
        manifest = read_manifest(folder / TRAIN)
        if manifest is None:
            raise ValueError(f"{folder} holds no prepared corpus")
        if manifest.shard is None:
            raise ValueError(f"{folder} is no shard: it was prepared without --shard")
        shard = Shard(folder, manifest)
        if shard.number in shards:
            raise ValueError(
                f"{shards[shard.number].folder} and {folder} are both shard {shard.number}"
            )
        shards[shard.number] = shard
    ordered = [shards[number] for number in sorted(shards)]
    _check_equal(ordered)
    assert ordered[0].manifest.shard is not None
    count = ordered[0].manifest.shard.count
    missing = [str(number) for number in range(count) if number not in shards]
    if missing:
        raise ValueError(f"of {count} shards these are missing: {', '.join(missing)}")
    return ordered


def _check_equal(shards: list[Shard]) -> None:
    first = shards[0]
    for shard in shards[1:]:
        # A shard without invalid documents is the same with and without --skip-invalid.
        inputs = shard.manifest.inputs.model_copy(
            update={"skip_invalid": first.manifest.inputs.skip_invalid}
        )
        found = difference(inputs, first.manifest.inputs)
        if found is not None:
            raise ValueError(f"{shard.folder} and {first.folder} do not fit: {found}")
        ours, theirs = shard.manifest.shard, first.manifest.shard
        assert ours is not None
        assert theirs is not None
        if ours.count != theirs.count:
            raise ValueError(
                f"{shard.folder} is one of {ours.count} shards, {first.folder} one of "
                f"{theirs.count}"
            )
        if ours.plan != theirs.plan:
            raise ValueError(
                f"{shard.folder} and {first.folder} do not fit: the sources' files changed in "
                "between"
            )


def merge(shards: list[Shard], inputs: Inputs, output: Path) -> Manifest:
    """Writes the folder `output`, all of it or nothing, or goes on with what a call has left.

    Raises:
        ValueError: a shard is damaged, another call is at work, or a partial folder is of another
            one.
        OSError: a file cannot be read or written, or the disk is full.
        Unfinished: one of these, with a partial folder that can be continued.
    """
    with PartialFolder(output) as folder:
        manifest = find_prepared(output, inputs, None)
        if manifest is not None:  # by a call that was at work when this one began
            folder.discard()
            return manifest
        manifest = folder.manifest()
        if manifest is None:
            agree_on_plan(folder, lambda: _plan_lines(shards, inputs))
            manifest = _fill(folder, shards, inputs)
        else:
            refuse_other(folder.path, manifest, inputs, None)
        folder.publish(manifest, (PLAN, DUPLICATES, *SCRATCH))
    return manifest


def _plan_lines(shards: list[Shard], inputs: Inputs) -> Iterator[str]:
    yield json.dumps({"inputs": inputs.model_dump(mode="json"), "merge": len(shards)})
    for shard in shards:
        content = (shard.folder / MANIFEST_NAME).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        yield json.dumps({"path": str(shard.folder.resolve()), "manifest": digest})


def _fill(folder: PartialFolder, shards: list[Shard], inputs: Inputs) -> Manifest:
    output = None
    try:
        if inputs.deduplicate and not (folder.path / DUPLICATES).exists():
            _find_duplicates(folder, shards)
        splits = tuple(shards[0].manifest.splits)
        dtype = np.dtype(shards[0].manifest.dtype)
        output = CorpusOutput(
            folder.path,
            splits,
            dtype,
            inputs.tokenizer.special_tokens["eos"],
            drop={
                split: Duplicates(folder.path / DUPLICATES / split)
                for split in splits
                if inputs.deduplicate
            },
        )
        for shard in track(
            shards[output.parts :],
            "merge",
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        ):
            shard.check_small_files()
            output.append(shard.part)
            output.commit()
        check_splits(output, inputs)
        for path in sorted(shards[0].folder.glob("tokenizer*")):
            folder.write(path.name, [path.read_bytes()])
        return Manifest(
            inputs=inputs,
            dtype=dtype.name,
            splits=output.finish(),
            skipped=output.skipped,
            unknown_tokens=output.unknown_tokens,
        )
    except BaseException as problem:
        if output is None or output.parts == 0 or isinstance(problem, UselessError):
            folder.discard()
            raise
        raise Unfinished(problem, folder.path, "the same command goes on from it") from problem


def _find_duplicates(folder: PartialFolder, shards: list[Shard]) -> None:
    for shard in shards:
        shard.check_small_files()
    find_duplicates(
        folder,
        {
            split: [shard.folder / f"{split}.hashes" for shard in shards]
            for split in shards[0].manifest.splits
        },
    )


def _run(arguments: argparse.Namespace) -> None:
    shards = read_shards(arguments.shards)
    inputs = shards[0].manifest.inputs.model_copy(
        update={"skip_invalid": any(shard.manifest.inputs.skip_invalid for shard in shards)}
    )
    output = arguments.output
    manifest = find_prepared(output, inputs, None)
    if manifest is not None:
        print_report(manifest, output, "already prepared: ")
        return
    print_report(merge(shards, inputs, output), output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.merge",
        description="Joins the shards that `python -m data.prepare --shard` made.",
        epilog="example: python -m data.merge --output corpus shards/*",
    )
    parser.add_argument("shards", metavar="SHARD", nargs="+", type=Path, help="folder of a shard")
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
