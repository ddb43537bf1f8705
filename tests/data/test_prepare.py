from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.dataset import Corpus
from data.manifest import read_manifest
from data.prepare import main
from data.token_file import TokenFile
from data.tokenizer import Tokenizer, load_tokenizer
from data.train_tokenizer import train_tokenizer

Command = Callable[..., "subprocess.CompletedProcess[str]"]

TEXTS = [
    *(f"document {i}: \U0001f600\u00e9 </s>\u2581\0\r\n\t  end " * (1 + i % 7) for i in range(40)),
    " ", "\n",
]  # fmt: skip


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def prepare(command: Command, model_path: Path, tmp_path: Path) -> Command:
    def run(source: Path | str, *options: str | Path, **keywords: object) -> object:
        arguments = ["--source", source, "--tokenizer", model_path, "--output", tmp_path / "out"]
        workers = [] if "--workers" in options else ["--workers", "1"]
        return command("data.prepare", *arguments, *workers, *options, **keywords)

    return run  # type: ignore[return-value]


def test_prepared_corpus(
    prepare: Command, tokenizer: Tokenizer, model_path: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [*TEXTS, "", ""])
    done = prepare(source, "--validation-fraction", "0.2")
    assert "2 empty, 0 invalid" in done.stdout
    assert done.stderr == ""  # no progress bar where there is no terminal
    out = tmp_path / "out"
    assert sorted(files(out)) == [
        "manifest.json", "tokenizer.model", "train.bin", "train.idx", "validation.bin",
        "validation.idx",
    ]  # fmt: skip
    splits = {name: TokenFile(out / name) for name in ("train", "validation")}
    decoded: dict[str, list[str]] = {}
    for name, file in splits.items():
        documents = [file.document(i).tolist() for i in range(file.document_count)]
        ends = f"{file.document_count} documents, {file.token_count:,} tokens of which "
        assert f"{name} {ends}{file.document_count} end documents" in done.stdout
        # DP-01, DP-02, DP-03: one end each, at the end; lengths add up to the file.
        assert all(document.index(2) == len(document) - 1 > 0 for document in documents)
        assert sum(map(len, documents)) == file.token_count
        assert int((file.tokens(0, file.token_count) == 2).sum()) == file.document_count
        decoded[name] = [tokenizer.decode(document[:-1]) for document in documents]
    held_out = [
        text
        for text in TEXTS
        if int.from_bytes(
            hashlib.blake2b(text.encode(), digest_size=8, person=b"validation").digest(), "big"
        )
        / 2**64
        < 0.2
    ]
    assert decoded["validation"] == held_out
    assert decoded["train"] == [text for text in TEXTS if text not in held_out]
    assert 0 < len(held_out) < 20

    manifest = read_manifest(out / "train")
    assert manifest is not None
    assert manifest.vocabulary_size == 320
    assert manifest.dtype == "uint16"
    assert manifest.inputs.tokenizer.sha256 == hashlib.sha256(model_path.read_bytes()).hexdigest()
    assert (manifest.skipped.empty, manifest.skipped.invalid) == (2, 0)
    assert [s.model_dump() for s in manifest.inputs.sources] == [
        {"source": str(source), "files": 1, "bytes": source.stat().st_size}
    ]
    for name, split in manifest.splits.items():
        assert (split.documents, split.tokens) == (
            splits[name].document_count, splits[name].token_count,
        )  # fmt: skip
        for kind, record in (("bin", split.bin), ("idx", split.idx)):
            content = (out / f"{name}.{kind}").read_bytes()
            assert record.bytes == len(content)
            assert record.sha256 == hashlib.sha256(content).hexdigest()
        assert splits[name].fingerprint == split.fingerprint


@pytest.mark.slow
def test_output_depends_on_neither_workers_nor_locale(
    small_steps: Any, mixed_sources: list[Path], tmp_path: Path
) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    expected = None
    for workers, environment in (("1", {}), ("2", locale), ("4", {})):
        output = tmp_path / workers
        line = small_steps.prepare(mixed_sources, output, "--skip-invalid", "--workers", workers)
        small_steps.run(["env", *(f"{key}={value}" for key, value in environment.items()), *line])
        expected = expected or files(output)
        assert files(output) == expected
    # DP-16: the order is that of the sources as given.
    small_steps.run(small_steps.prepare(mixed_sources[::-1], tmp_path / "r", "--skip-invalid"))
    assert files(tmp_path / "r")["train.bin"] != expected["train.bin"]


def test_again(prepare: Command, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    prepare(source, "--validation-fraction", "0")
    before = files(tmp_path / "out")
    assert "validation.bin" not in before
    assert "already prepared" in prepare(source, "--validation-fraction", "0").stdout
    other = prepare(source, "--validation-fraction", "0.5", mistake=True)
    assert "holds another corpus: its validation_fraction is 0.0, not 0.5" in other.stderr
    write_jsonl(source, [*TEXTS, "more"])
    assert "its sources is" in prepare(source, "--validation-fraction", "0", mistake=True).stderr
    assert files(tmp_path / "out") == before
    write_jsonl(source, TEXTS)
    (tmp_path / "out" / "train.bin").write_bytes(before["train.bin"][:-2])
    damaged = prepare(source, "--validation-fraction", "0", mistake=True)
    assert "train.bin" in damaged.stderr
    assert "truncated" in damaged.stderr


def test_output_that_holds_other_things(prepare: Command, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    (tmp_path / "out").mkdir()
    prepare(source, "--validation-fraction", "0")  # an empty folder is free
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    assert "holds no prepared corpus" in prepare(source, mistake=True).stderr
    assert files(tmp_path / "out") == {"thesis.txt": b"precious"}


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', [], "x.jsonl:2: broken JSON at column 10"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', [], "byte 0xe9 at byte offset 24"),
        (b'{"text": "a"}\n', ["--text-key", "body"], "x.jsonl:1: no key 'body'"),
        (b'{"text": ""}\n{"text": ""}\n', [], "no text: 2 documents are empty and 0 invalid"),
        (b"", [], "no text: 0 documents are empty"),
        (b"{\n", ["--skip-invalid"], "no text: 0 documents are empty and 1 invalid"),
        (b'{"text": "a"}\n', ["--validation-fraction", "1"], "expected 0 or more, below 1"),
        (b'{"text": "a"}\n', ["--validation-fraction", "nan"], "expected 0 or more, below 1"),
        (b'{"text": "a"}\n', ["--validation-fraction", "1e-9"], "1 documents falls into the valid"),
        (b'{"text": "a"}\n', ["--workers", "0"], "expected 1 or more"),
        (b'{"text": "a"}\n', ["--shard", "2/2"], "shards of 2 have the numbers 0 to 1"),
        (b'{"text": "a"}\n', ["--shard", "1"], "--shard 1: expected i/n"),
        (b'{"text": "a"}\n', ["--output", "/proc/out"], "/proc/out.partial"),
        (b'{"text": "a"}\n', ["--source", "nowhere"], "source 'nowhere' does not exist"),
        (b'{"text": "a"}\n', ["--tokenizer", "no.model"], "no.model"),
    ],
)
def test_mistakes(
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    options: list[str],
    message: str,
) -> None:
    source = tmp_path / "x.jsonl"
    source.write_bytes(content)
    line = ["--source", source, "--tokenizer", model_path, "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["prepare", *map(str, line), "--workers", "1", *options])
    assert main() == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert list(tmp_path.iterdir()) == [source]


def test_skip_invalid_counts_and_lists(prepare: Command, tmp_path: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_bytes(b'{"text": "a"}\n{"text": \n{"text": "\xe9"}\n{"text": "b"}\n')
    done = prepare(source, "--skip-invalid", "--validation-fraction", "0")
    assert "2 documents" in done.stdout
    assert "0 empty, 2 invalid" in done.stdout
    assert "x.jsonl:2: broken JSON" in done.stderr
    assert "x.jsonl:3: not valid UTF-8" in done.stderr
    lines = (tmp_path / "out" / "invalid.txt").read_text().splitlines()
    assert [line.split(" ")[0] for line in lines] == [f"{source}:2:", f"{source}:3:"]
    assert TokenFile(tmp_path / "out" / "train").document_count == 2


@pytest.mark.parametrize("workers", ["1", "2"])
def test_full_disk(prepare: Command, tmp_path: Path, workers: str) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", ["many words " * 20_000] * 20)
    done = prepare(
        source, "--validation-fraction", "0", "--workers", workers, mistake=True,
        prefix=["bash", "-c", 'ulimit -f 64; exec "$@"', "bash"],
    )  # fmt: skip
    assert "File too large" in done.stderr
    assert "train.bin" in done.stderr
    assert list(tmp_path.iterdir()) == [source]


def train_lossy(prefix: Path, **options: Any) -> Path:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words of text"] * 3), model_prefix=str(prefix),
        vocab_size=30, hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return prefix.with_suffix(".model")


def test_tokenizer_without_end_of_document(prepare: Command, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", ["text"])
    model = train_lossy(tmp_path / "m", eos_id=-1)
    done = prepare(source, "--tokenizer", model, mistake=True)
    assert "no end-of-sentence token" in done.stderr
    assert not (tmp_path / "out").exists()


def test_tokenizer_that_loses_text(prepare: Command, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", ["text", "  ", "few Q Q"])
    model = train_lossy(tmp_path / "m")
    done = prepare(source, "--tokenizer", model, "--validation-fraction", "0")
    assert f"warning: {model} does not keep text to the byte" in done.stderr
    # TK-02: Q was not in the training text.
    manifest = read_manifest(tmp_path / "out" / "train")
    assert manifest is not None
    assert manifest.unknown_tokens == 2
    share = 2 / manifest.splits["train"].tokens
    assert f"warning: 2 tokens ({share:.2%}) stand for text that the tokenizer" in done.stderr
    # DP-01: "  " has no tokens.
    assert manifest.skipped.empty == 1
    assert manifest.splits["train"].documents == 2


def test_a_tokenizer_json(command: Command, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Reference
    from tokenizers import decoders, models, pre_tokenizers, trainers

    reference = Reference(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]  # its stub names no keywords
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    reference.train_from_iterator(TEXTS, trainer)
    reference.enable_truncation(16)  # DP-31: nothing is cut off
    reference.save(str(tmp_path / "tokenizer.json"))
    reference.no_truncation()
    texts = ["many <|word|> " * 50, *TEXTS]
    command(
        "data.prepare", "--source", write_jsonl(tmp_path / "x.jsonl", texts), "--tokenizer",
        tmp_path / "tokenizer.json", "--end-of-document", "<|end|>", "--output", tmp_path / "out",
        "--workers", "2", "--validation-fraction", "0",
    )  # fmt: skip
    end = reference.token_to_id("<|end|>")
    file = TokenFile(tmp_path / "out" / "train")
    found = [file.document(i).tolist() for i in range(file.document_count)]
    assert found == [[*reference.encode(text).ids, end] for text in texts]
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_sources_of_all_kinds(prepare: Command, tokenizer: Tokenizer, tmp_path: Path) -> None:
    import gzip

    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    texts = [f"document {i} " * (i + 1) for i in range(12)]
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts[:3]).encode())
    )
    pyarrow.parquet.write_table(
        pa.table({"text": texts[3:6]}), folder / "b.parquet", row_group_size=2
    )
    (folder / "c.txt").write_text(texts[6])
    (folder / "d.txt").write_text("")
    (folder / "e.txt").write_text(texts[7])
    datasets.Dataset.from_dict({"text": texts[8:]}).save_to_disk(tmp_path / "saved")
    hub = f"hf:{tmp_path / 'saved'}"
    done = prepare(folder, "--source", hub, "--workers", "2", "--validation-fraction", "0")
    assert "1 empty" in done.stdout
    file = TokenFile(tmp_path / "out" / "train")
    decoded = [tokenizer.decode(file.document(i)[:-1].tolist()) for i in range(file.document_count)]
    assert decoded == texts
    manifest = read_manifest(tmp_path / "out" / "train")
    assert manifest is not None
    assert [source.files for source in manifest.inputs.sources] == [5, 1]


def test_corpus_and_manifest_agree(prepare: Command, tmp_path: Path) -> None:
    prepare(write_jsonl(tmp_path / "x.jsonl", TEXTS), "--validation-fraction", "0")
    prefix = tmp_path / "out" / "train"
    assert Corpus(prefix, 8, 0, vocabulary_size=320).samples_per_epoch > 10
    with pytest.raises(
        ValueError, match="tokenizer has 320 ids, but the model's vocabulary is 319"
    ):
        Corpus(prefix, 8, 0, vocabulary_size=319)
    manifest = tmp_path / "out" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["splits"]["train"]["tokens"] += 1
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"but manifest\.json says"):
        TokenFile(prefix)
    content["splits"]["train"]["tokens"] = "many"
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest\.json: splits\.train\.tokens: .* integer"):
        TokenFile(prefix)
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json: the file: Invalid JSON"):
        TokenFile(prefix)
    manifest.unlink()
    assert TokenFile(prefix).manifest is None


def test_large_vocabulary_is_not_cut_to_16_bits(command: Command, tmp_path: Path) -> None:
    # DP-04: ids above 65,535, from a tokenizer whose pieces are mostly single characters.
    text = "".join(chr(c) for c in range(0x3400, 0x3400 + 70_000) if not 0xD800 <= c < 0xE000)
    model = tmp_path / "large.model"
    size = 4 + 256 + 66_000
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text[i : i + 1000] for i in range(0, len(text), 1000)),
        model_prefix=str(tmp_path / "large"), model_type="char", vocab_size=size,
        character_coverage=1.0, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, minloglevel=2, use_all_vocab=True,
    )  # fmt: skip
    tokenizer = load_tokenizer(model)
    assert tokenizer.vocabulary_size > 65_536
    write_jsonl(tmp_path / "x.jsonl", [text])
    command(
        "data.prepare", "--source", tmp_path / "x.jsonl", "--tokenizer", model, "--output",
        tmp_path / "out", "--workers", "1", "--validation-fraction", "0",
    )  # fmt: skip
    file = TokenFile(tmp_path / "out" / "train")
    assert file.dtype == np.int32
    assert int(file.document(0).max()) > 65_535
    assert tokenizer.decode(file.document(0)[:-1].tolist()) == text


def test_tokenizer_command(command: Command, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    arguments = ["data.tokenizer", "train", "--source", source, "--output", tmp_path / "t.model"]
    done = command(*arguments, "--vocab-size", "300")
    assert "300 pieces" in done.stdout
    assert "round trip 100.00%" in done.stdout
    train_tokenizer(TEXTS, 300, tmp_path / "same.model")
    assert (tmp_path / "t.model").read_bytes() == (tmp_path / "same.model").read_bytes()
    too_large = command(*arguments, "--vocab-size", "32000", mistake=True)
    assert "the largest it supports is" in too_large.stderr
    assert "need at least" in command(*arguments, "--vocab-size", "200", mistake=True).stderr
    source.write_text("{")
    assert (
        "x.jsonl:1: broken JSON" in command(*arguments, "--vocab-size", "300", mistake=True).stderr
    )
    assert (
        "no text"
        in command(*arguments, "--vocab-size", "300", "--skip-invalid", mistake=True).stderr
    )


@pytest.mark.parametrize("module", ["data.prepare", "data.tokenizer"])
def test_help_has_an_example(command: Command, module: str) -> None:
    arguments = ["train"] if module == "data.tokenizer" else []
    assert "example: python -m data." in command(module, *arguments, "--help").stdout
