"""data.inspect: what it shows and what it finds, against corpora whose content is known."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data import inspect
from data.lengths import measure
from data.manifest import Inputs, Manifest, Skipped, SourceRecord
from data.token_file import TokenFileWriter
from data.tokenizer import Tokenizer

TEXTS = ["The quick brown fox", "jumps over", "the lazy dog. [/b]\n\ttab"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; returns the exit code and what it printed."""

    def run(*arguments: str | Path | int) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["data.inspect", *map(str, arguments)])
        try:
            code = inspect.main()
        except SystemExit as exit:
            code = int(exit.code or 0)
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def corpus(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A prepared folder; its splits hold TEXTS and the first of them."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    records = {}
    for split, texts in (("train", TEXTS), ("validation", TEXTS[:1])):
        with TokenFileWriter(folder / split, tokenizer.vocabulary_size) as writer:
            for text in texts:
                ids = [*tokenizer.encode(text), tokenizer.end_of_document]
                writer.append(np.array(ids), np.array([len(ids)], np.int32))
        records[split] = writer.record
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    manifest = Manifest(
        inputs=Inputs(
            sources=(SourceRecord(source="texts.jsonl", files=1, bytes=1234567),),
            tokenizer=tokenizer.identity,
            text_key="text",
            skip_invalid=False,
            validation_fraction=0.5,
        ),
        dtype="uint16",
        splits=records,
        skipped=Skipped(empty=0, invalid=0),
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return folder


@pytest.fixture
def foreign(corpus: Path, tmp_path: Path, model_path: Path) -> Path:
    """The prefix of the train split as another tool would leave it."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"foreign{suffix}").write_bytes((corpus / f"train{suffix}").read_bytes())
    return tmp_path / "foreign"


def test_summary(run: Run, corpus: Path, tokenizer: Tokenizer) -> None:
    code, output, _ = run(corpus)
    assert code == 0
    sizes = sorted(len(tokenizer.encode(text)) + 1 for text in TEXTS)
    assert re.search(r"inputs\.sources\.0\.bytes +1,234,567 *\n", output)
    assert tokenizer.identity.sha256 in re.sub(r"\s", "", output)
    assert f"train: 3 documents, {sum(sizes):,} tokens (uint16)" in output
    assert (
        f"min {sizes[0]}, median {sizes[1]}, mean {sum(sizes) / 3:,.1f}, p99 {sizes[2]}, "
        f"max {sizes[2]}" in output
    )
    assert "validation: 1 documents" in output
    _, only, _ = run(corpus, "--split", "validation")
    assert "train: " not in only


def test_lengths_against_numpy() -> None:
    generator = np.random.default_rng(0)
    lengths = np.concatenate(
        (generator.integers(1, 5000, 999), [1 << 20, (1 << 20) - 1, 1 << 31, 3, 0])
    )
    measured = measure(np.array_split(lengths, 7))
    assert measured is not None
    assert (measured.documents, measured.tokens) == (1004, lengths.sum())
    assert (measured.minimum, measured.maximum) == (0, 1 << 31)
    expected = np.percentile(lengths, [50, 99], method="inverted_cdf")
    assert (measured.median, measured.p99) == tuple(expected)
    assert measured.mean == pytest.approx(lengths.mean())
    for start, end, documents, tokens in measured.buckets:
        inside = lengths[(lengths >= start) & (lengths <= end)]
        assert (documents, tokens) == (len(inside), inside.sum())
    assert sum(documents for _, _, documents, _ in measured.buckets) == 1004
    starts = [start for start, *_ in measured.buckets]
    assert starts == [0, *(1 << bit for bit in range(32))]
    assert measure([]) is None


def test_documents_and_samples(run: Run, corpus: Path, tokenizer: Tokenizer) -> None:
    ids = [[*tokenizer.encode(text), tokenizer.end_of_document] for text in TEXTS]
    joined = [token for document in ids for token in document]
    for number, text in enumerate(TEXTS):
        code, output, _ = run(corpus, "--document", number)
        assert code == 0
        heading, shown = output.split("\n\n", 1)
        assert shown == f"{text}\n--- end of document ---\n"
        start = sum(map(len, ids[:number]))
        assert heading.endswith(f": tokens {start} to {start + len(ids[number]) - 1}")
    _, output, _ = run(corpus, "--document", 1, "--ids")
    rows = [line.split(maxsplit=2) for line in output.splitlines()[2:]]
    assert [int(row[1]) for row in rows] == ids[1]
    assert [int(row[0].replace(",", "")) for row in rows] == [
        *range(len(ids[0]), len(ids[0]) + len(ids[1]))
    ]
    assert rows[-1][2] == "'</s>'"
    _, output, _ = run(corpus, "--sample", 1, "--sequence-length", 5, "--ids")
    shown_ids = [int(line.split()[1]) for line in output.splitlines()[2:]]
    assert shown_ids == joined[5:11], "a sample is one token longer than the sequence"
    _, output, _ = run(corpus, "--document", 0, "--split", "validation")
    assert TEXTS[0] in output
    last = (len(joined) - 1) // 5
    code, _, error = run(corpus, "--sample", last, "--sequence-length", 5)
    assert (code, error) == (
        2, f"error: --sample {last}: {corpus}/train.bin has {last}, counted from 0\n"
    )  # fmt: skip
    code, _, error = run(corpus, "--document", 3)
    assert (code, error) == (2, f"error: --document 3: {corpus}/train.bin has 3, counted from 0\n")


def test_corpora_of_other_tools(run: Run, foreign: Path, model_path: Path) -> None:
    code, output, _ = run(foreign)
    assert code == 0
    assert "no manifest.json" in output
    assert "3 documents" in output
    code, _, error = run(foreign, "--document", 0)
    assert code == 2
    assert "give it with --tokenizer" in error
    assert run(foreign, "--document", 0, "--ids")[0] == 0
    _, output, _ = run(foreign, "--document", 2, "--tokenizer", model_path)
    assert TEXTS[2] in output
    code, _, error = run(foreign, "--verify")
    assert code == 2
    assert "give --tokenizer" in error
    code, output, _ = run(foreign, "--verify", "--tokenizer", model_path)
    assert code == 0
    assert "whole (ids and ends of 1 token files)" in output


def test_documents_of_several_sequences(run: Run, tmp_path: Path) -> None:
    """As Megatron writes with --split-sentences: lengths 2, 1, 3 in documents of 2 and 1."""
    (tmp_path / "x.bin").write_bytes(np.arange(6, dtype="<u2").tobytes())
    (tmp_path / "x.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 3)
        + np.array([2, 1, 3], "<i4").tobytes()
        + np.array([0, 4, 6], "<i8").tobytes()
        + np.array([0, 2, 3], "<i8").tobytes()
    )
    assert "min 3, median 3, mean 3.0, p99 3, max 3" in run(tmp_path / "x")[1]
    _, output, _ = run(tmp_path / "x", "--document", 1, "--ids")
    assert [line.split()[:2] for line in output.splitlines()[2:]] == [
        ["3", "3"],
        ["4", "4"],
        ["5", "5"],
    ]


def test_a_whole_corpus(run: Run, corpus: Path) -> None:
    code, output, error = run(corpus, "--verify")
    assert (code, output) == (
        0,
        f"{corpus}: whole (checksums, ids and ends of documents of 2 token files)\n",
    )
    assert "error" not in error


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bin": (lambda corpus: flip(corpus / "validation.bin", 2), r"/validation\.bin: its checksum"),
    "idx": (lambda corpus: flip(corpus / "train.idx", 40), r"/train\.idx: its checksum"),
    "cut": (
        lambda corpus: (corpus / "train.bin").write_bytes((corpus / "train.bin").read_bytes()[:-1]),
        r"/train\.bin: \d+ bytes, but manifest\.json says \d+: truncated",
    ),
    "gone": (lambda corpus: (corpus / "train.bin").unlink(), r"/train\.bin is missing"),
    "tokenizer": (lambda corpus: (corpus / "tokenizer.model").unlink(), r"tokenizer\.model"),
    "manifest": (
        lambda corpus: (corpus / "manifest.json").write_text("{"),
        r"/manifest\.json: the file: Invalid JSON",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(run: Run, corpus: Path, damage: str) -> None:
    act, message = DAMAGES[damage]
    act(corpus)
    code, output, error = run(corpus, "--verify")
    assert code == 1
    assert output == ""
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[5, 6, 2], [7], [8, 2]], r"document 1 ends with the token 7, not with the"),
        ([[5, 6, 2], [7, 2, 2], [2]], r"document 1 holds the end-of-document token 2 before its"),
        ([[5, 2], [6, 2, 7]], r"document 1 holds the end-of-document token 2 before its end, at"),
        ([[5, 2], [], [6, 2]], r"document 1 has no tokens"),
        ([[5, 2], [999, 2]], r"token 2 is 999, outside the vocabulary of 320"),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_ids_and_ends_of_documents(
    run: Run,
    write_corpus: Callable[..., Path],
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    documents: list[list[int]],
    message: str,
    block: int,
) -> None:
    monkeypatch.setattr("data.verify._BLOCK", block)
    monkeypatch.setattr("data.token_file._BLOCK", block)
    prefix = write_corpus(documents, vocabulary_size=1000)
    code, _, error = run(prefix, "--verify", "--tokenizer", model_path)
    assert code == 1
    assert re.search(rf"error: {prefix}\.bin: {message}", error), error


def test_mistakes(run: Run, corpus: Path, foreign: Path, tmp_path: Path) -> None:
    for arguments, message in {
        (corpus / "nothing",): "neither a folder nor a token file",
        (tmp_path,): None,
        (corpus, "--split", "test"): "has no split 'test'; its token files are: train, validation",
        (foreign, "--split", "train"): "is no folder",
        (corpus, "--sample", "0"): "--sample N and --sequence-length L go together",
        (corpus, "--sample", "0", "--sequence-length", "0"): "--sequence-length 0",
        (corpus, "--ids"): "--ids shows the tokens of",
        (corpus, "--document", "-1"): "expected a number from 0",
        (corpus, "--tokenizer", tmp_path / "no.model", "--document", "0"): "no.model",
    }.items():
        code, _, error = run(*arguments)
        if message is None:  # a folder of token files without a manifest
            assert code == 0
        else:
            assert code == 2, arguments
            assert message in error
            assert "Traceback" not in error
    other = json.loads((corpus / "manifest.json").read_text())
    other["inputs"]["tokenizer"]["sha256"] = hashlib.sha256(b"other").hexdigest()
    (corpus / "manifest.json").write_text(json.dumps(other))
    code, _, error = run(corpus, "--document", 0)
    assert code == 2
    assert "is not the tokenizer that" in error


@pytest.mark.slow
def test_a_corpus_as_prepared(
    command: Callable[..., object], tmp_path: Path, model_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = (
        "--source",
        tmp_path / "a.jsonl",
        "--tokenizer",
        model_path,
        "--output",
        tmp_path / "c",
    )
    command("data.prepare", *options, "--validation-fraction", "0", "--workers", "1")
    assert "whole" in command("data.inspect", tmp_path / "c", "--verify").stdout  # type: ignore[attr-defined]
    shown = command("data.inspect", tmp_path / "c", "--document", "2", LC_ALL="POSIX").stdout  # type: ignore[attr-defined]
    assert TEXTS[2] in shown
