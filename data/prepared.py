"""A prepared folder: is it the one asked for, is it whole, what is there to say of it."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from data.manifest import TRAIN, Inputs, Manifest, ShardRecord, read_manifest
from data.output import INVALID, CorpusOutput
from data.partial import UselessError, remove_lock
from data.token_file import TokenFile

# Invalid documents named on standard error; all are in invalid.txt.
_NAMED = 5


def check_splits(output: CorpusOutput, inputs: Inputs) -> None:
    """Raises UselessError if a split holds no document."""
    if output.documents == 0:
        raise UselessError(
            f"the sources hold no text: {output.skipped.empty:,} documents are empty and "
            f"{output.skipped.invalid:,} invalid"
        )
    for split, documents in output.split_documents().items():
        if documents == 0:
            raise UselessError(
                f"none of the {output.documents:,} documents falls into the {split} split at "
                f"--validation-fraction {inputs.validation_fraction}: choose another fraction "
                "(0 for no validation split), or cut the text into more documents"
            )


def find_prepared(output: Path, inputs: Inputs, shard: ShardRecord | None) -> Manifest | None:
    """The manifest of `output` if it was prepared from exactly these inputs; None if it is free.

    Raises ValueError if it holds anything else, or if its files are damaged.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    manifest = read_manifest(output / TRAIN)
    if manifest is None:
        raise ValueError(
            f"{output} exists but holds no prepared corpus: remove it or choose another --output"
        )
    refuse_other(output, manifest, inputs, shard)
    for name in manifest.splits:
        TokenFile(output / name)
    remove_lock(output)
    return manifest


def refuse_other(
    folder: Path, manifest: Manifest, inputs: Inputs, shard: ShardRecord | None
) -> None:
    """Raises ValueError that names the first difference of a folder's manifest from the inputs."""
    found = difference(manifest.inputs, inputs)
    if found is None and manifest.shard != shard:
        found = f"its shard is {_shown(manifest.shard)}, not {_shown(shard)}"
    if found is not None:
        raise ValueError(
            f"{folder} holds another corpus: {found}; remove it or choose another --output"
        )


def _shown(shard: ShardRecord | None) -> str:
    return f"{shard.number}/{shard.count} of plan {shard.plan[:8]}" if shard else "the whole"


def difference(found: Inputs, wanted: Inputs) -> str | None:
    """The first difference in words, None if there is none."""
    before = found.model_dump()
    for key, value in wanted.model_dump().items():
        if before[key] != value:
            return f"its {key} is {before[key]}, not {value}"
    return None


def summary(manifest: Manifest, output: Path) -> str:
    splits = "; ".join(
        f"{name} {split.documents:,} documents, {split.tokens:,} tokens"
        + (
            f" of which {split.end_of_document_tokens:,} end documents"
            if split.end_of_document_tokens is not None
            else ""
        )
        for name, split in manifest.splits.items()
    )
    skipped = manifest.skipped
    duplicate = f", {skipped.duplicate:,} duplicate" if manifest.inputs.deduplicate else ""
    return (
        f"{output}: {splits} ({manifest.dtype}); documents skipped: "
        f"{skipped.empty:,} empty, {skipped.invalid:,} invalid{duplicate}"
    )


def print_report(manifest: Manifest, output: Path, before: str = "") -> None:
    """The summary, and on standard error what the user should know beside it."""
    if manifest.skipped.invalid:
        with (output / INVALID).open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, _NAMED):
                print(f"skipped: {line.rstrip()}", file=sys.stderr)
        print(
            f"skipped: {manifest.skipped.invalid:,} invalid documents, listed in "
            f"{output / INVALID}",
            file=sys.stderr,
        )
    tokens = sum(split.tokens for split in manifest.splits.values())
    if manifest.unknown_tokens:
        print(
            f"warning: {manifest.unknown_tokens:,} tokens ({manifest.unknown_tokens / tokens:.2%}) "
            "stand for text that the tokenizer does not know, which is lost",
            file=sys.stderr,
        )
    for name, split in manifest.splits.items():
        if split.end_of_document_tokens not in (None, split.documents):
            print(
                f"warning: {name}: the tokenizer makes end-of-document tokens of text as well: "
                f"{split.end_of_document_tokens:,} in {split.documents:,} documents",
                file=sys.stderr,
            )
    print(f"{before}{summary(manifest, output)}")
