"""A corpus, or a shard of one, from its plan.

Each worker reads the chunks of a job, makes them tokens and writes them as chunks/N. This process
adds the jobs' folders in order to the output and, after each commit, removes them, so that the disk
holds the corpus once and beside it 64 MB or the largest job. Where duplicates are dropped, all jobs
come before the first is added.

Memory, whatever the corpus and its documents: some 200 MB a worker and as much here, half of it the
interpreter and its libraries. It grows only with the number of files: the plan is a list.
"""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from data.deduplicate import FOLDER as DUPLICATES
from data.deduplicate import Duplicates, find_duplicates
from data.encoding import ChunkRecord, Options, encode_chunks
from data.files import sync_folder
from data.manifest import Inputs, Manifest, ShardRecord
from data.output import INVALID, SCRATCH, CorpusOutput, Part, PartSplit
from data.partial import PartialFolder, Unfinished, UselessError
from data.plan import PLAN, Job, Plan, agree_on_plan, changed_file, plan_lines
from data.prepared import check_splits, find_prepared, refuse_other
from data.progress import PreparationProgress
from data.token_file import token_dtype
from data.tokenizer import Tokenizer
from data.workers import WorkerPool

_CHUNKS = "chunks"

# Between two commits: each waits for the disk.
_COMMIT_BYTES, _COMMIT_PARTS = 1 << 26, 64


class _Preparation:
    """One call's work in its partial folder."""

    def __init__(
        self,
        folder: PartialFolder,
        plan: Plan,
        inputs: Inputs,
        shard: ShardRecord | None,
        options: Options,
        tokenizer: Tokenizer,
    ) -> None:
        self.folder, self.plan, self.inputs, self.shard = folder, plan, inputs, shard
        self.options = options
        self.tokenizer = tokenizer
        self.jobs = list(plan.jobs())
        self.chunks = folder.path / _CHUNKS
        self.chunks.mkdir(exist_ok=True)
        self.drop = {
            split: Duplicates(folder.path / DUPLICATES / split)
            for split in options.splits
            if options.deduplicate
        }
        self.output = CorpusOutput(
            folder.path,
            options.splits,
            token_dtype(tokenizer.vocabulary_size),
            tokenizer.end_of_document,
            hashes=options.deduplicate and shard is not None,
            drop=self.drop,
        )
        self.committed = self.output.parts
        self.finished = self._finished_chunks()

    def _finished_chunks(self) -> set[int]:
        """Numbers of the chunks that wait to be added; the rest of an earlier call is removed."""
        finished = set()
        for path in self.chunks.iterdir():
            if path.name.isdecimal() and int(path.name) >= self.output.parts:
                finished.add(int(path.name))
            else:
                shutil.rmtree(path)
        return finished

    @property
    def has_work(self) -> bool:
        """Whether anything would be lost with the folder."""
        return bool(self.output.parts or self.finished)

    def run(self, workers: int) -> Manifest:
        todo = [
            job
            for job in self.jobs
            if job.number >= self.output.parts and job.number not in self.finished
        ]
        if self.has_work:
            done = f"{len(self.jobs) - len(todo):,} of {len(self.jobs):,} parts are done"
            print(f"continuing from {self.folder.path}: {done}", file=sys.stderr)
        total = sum(job.size for job in self.jobs)
        arguments = (self.tokenizer, self.options, self.chunks)
        with (
            WorkerPool[Job](_make_encoder, arguments, workers) as pool,
            PreparationProgress(total, total - sum(job.size for job in todo)) as progress,
        ):
            for event in pool.run(todo):
                if not event.done:
                    progress.report(event.job, event.content)
                    continue
                self.finished.add(event.job.number)
                progress.finish(event.job)
                if not self.options.deduplicate:
                    self._add_finished()
        # Once there, chunks may be gone.
        if self.options.deduplicate and not (self.folder.path / DUPLICATES).exists():
            self._find_duplicates()
        self._add_finished()
        self._commit()
        return self._manifest()

    def _find_duplicates(self) -> None:
        paths = {
            split: [self.chunks / str(job.number) / f"{split}.hashes" for job in self.jobs]
            for split in self.options.splits
        }
        find_duplicates(self.folder, paths)

    def _add_finished(self) -> None:
        output = self.output
        while output.parts in self.finished:
            self.finished.remove(output.parts)
            output.append(self._part(self.chunks / str(output.parts)))
            if (
                output.uncommitted_bytes >= _COMMIT_BYTES
                or output.parts - self.committed >= _COMMIT_PARTS
            ):
                self._commit()

    def _part(self, chunk: Path) -> Part:
        record = ChunkRecord.model_validate_json((chunk / "record.json").read_bytes())
        splits = {}
        for split in self.options.splits:
            lengths = chunk / f"{split}.lengths"
            splits[split] = PartSplit(
                bin=chunk / f"{split}.bin",
                lengths=lengths,
                lengths_offset=0,
                documents=lengths.stat().st_size // 4,
                hashes=chunk / f"{split}.hashes" if self.options.deduplicate else None,
            )
        return Part(splits, chunk / INVALID, record.skipped, record.unknown_tokens)

    def _commit(self) -> None:
        self.output.commit()
        for number in range(self.committed, self.output.parts):
            shutil.rmtree(self.chunks / str(number))
        self.committed = self.output.parts

    def _manifest(self) -> Manifest:
        with (self.folder.path / PLAN).open() as lines:
            changed = changed_file(lines)
        if changed is not None:
            raise UselessError(
                f"{changed} changed while it was being read: prepare the sources when they are at "
                "rest"
            )
        if self.shard is None:
            check_splits(self.output, self.inputs)
        return Manifest(
            inputs=self.inputs,
            shard=self.shard,
            dtype=token_dtype(self.tokenizer.vocabulary_size).name,
            splits=self.output.finish(),
            skipped=self.output.skipped,
            unknown_tokens=self.output.unknown_tokens,
        )


def _make_encoder(
    tokenizer: Tokenizer, options: Options, chunks: Path
) -> Callable[[Job, Callable[..., None]], None]:
    """What a worker does with its jobs."""

    def encode(job: Job, report: Callable[..., None]) -> None:
        # A name of its own: a worker whose parent was just killed may be at the same job.
        folder = chunks / f"{job.number}.{secrets.token_hex(4)}"
        try:
            encode_chunks(job.chunks, tokenizer, options, folder, report)
            sync_folder(folder)
            folder.rename(chunks / str(job.number))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    return encode


def prepare(
    plan: Plan,
    inputs: Inputs,
    shard: ShardRecord | None,
    options: Options,
    tokenizer: Tokenizer,
    output: Path,
    workers: int,
) -> Manifest:
    """Writes the folder `output`, all of it or nothing, or goes on with what a call has left.

    Raises:
        ValueError: a source or document is invalid, a split would be empty, another call is at
            work, or a partial folder was begun with other inputs.
        OSError: a file cannot be read or written, or the disk is full.
        WorkerDied: a worker process was killed.
        Unfinished: one of these, with a partial folder that can be continued.
    """
    with PartialFolder(output) as folder:
        manifest = find_prepared(output, inputs, shard)
        if manifest is not None:  # by a call that was at work when this one began
            folder.discard()
            return manifest
        manifest = folder.manifest()
        if manifest is None:
            agree_on_plan(folder, lambda: plan_lines(plan, inputs, shard))
            manifest = _fill(folder, plan, inputs, shard, options, tokenizer, workers)
        else:
            refuse_other(folder.path, manifest, inputs, shard)
        folder.publish(manifest, (PLAN, _CHUNKS, DUPLICATES, *SCRATCH))
    return manifest


def _fill(
    folder: PartialFolder,
    plan: Plan,
    inputs: Inputs,
    shard: ShardRecord | None,
    options: Options,
    tokenizer: Tokenizer,
    workers: int,
) -> Manifest:
    preparation = None
    try:
        preparation = _Preparation(folder, plan, inputs, shard, options, tokenizer)
        manifest = preparation.run(workers)
        for name, content in tokenizer.files.items():
            folder.write(name, [content])
    except BaseException as problem:
        if preparation is None or not preparation.has_work or isinstance(problem, UselessError):
            folder.discard()
            raise
        how = "the same command goes on from it"
        if isinstance(problem, ValueError):
            how += ", also with --skip-invalid added"
        raise Unfinished(problem, folder.path, how) from problem
    return manifest
