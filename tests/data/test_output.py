from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from data.manifest import Skipped
from data.output import CorpusOutput, Part, PartSplit
from data.token_file import TokenFile

END = 2
DOCUMENTS = [[[5, 6, END], [END]], [[7, END]], [], [[8, 9, 10, END], [END], [3, END]]]


def part(folder: Path, number: int) -> Part:
    documents = DOCUMENTS[number]
    prefix = folder / f"part-{number}"
    np.array(list(chain.from_iterable(documents)), "<u2").tofile(f"{prefix}.bin")
    np.array([0, *map(len, documents)], "<i4").tofile(f"{prefix}.lengths")
    Path(f"{prefix}.txt").write_text(f"line of {number}\n")
    split = PartSplit(
        Path(f"{prefix}.bin"), Path(f"{prefix}.lengths"), 4, len(documents), hashes=None
    )
    return Part({"train": split}, Path(f"{prefix}.txt"), Skipped(empty=1, invalid=1), 10)


def opened(folder: Path) -> CorpusOutput:
    return CorpusOutput(folder, ("train",), np.dtype("<u2"), END)


def test_what_is_beyond_the_journal_is_cut_off(tmp_path: Path) -> None:
    output = opened(tmp_path)
    output.append(part(tmp_path, 0))
    output.append(part(tmp_path, 1))
    output.commit()
    output.append(part(tmp_path, 3))  # not committed
    del output
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"parts": 3, "spl')
    output = opened(tmp_path)
    assert output.parts == 2
    assert output.split_documents() == {"train": 3}
    output.append(part(tmp_path, 2))
    output.append(part(tmp_path, 3))
    output.commit()
    assert opened(tmp_path).parts == 4
    record = output.finish()["train"]
    assert (record.documents, record.tokens, record.end_of_document_tokens) == (6, 13, 6)
    assert (output.skipped, output.unknown_tokens) == (Skipped(empty=4, invalid=4), 40)
    assert (tmp_path / "invalid.txt").read_text() == "".join(f"line of {i}\n" for i in range(4))
    file = TokenFile(tmp_path / "train")
    assert [file.document(i).tolist() for i in range(6)] == list(chain.from_iterable(DOCUMENTS))


def test_files_that_are_not_what_the_journal_says(tmp_path: Path) -> None:
    output = opened(tmp_path)
    output.append(part(tmp_path, 0))
    output.commit()
    content = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"train\.bin: shorter than the 8 bytes"):
        opened(tmp_path)
    (tmp_path / "train.bin").write_bytes(bytes(8))
    with pytest.raises(ValueError, match="0 end-of-document tokens, not 2"):
        opened(tmp_path)


@pytest.mark.parametrize(("change", "message"), [(-2, "shorter"), (2, "longer")])
def test_a_part_that_contradicts_itself(tmp_path: Path, change: int, message: str) -> None:
    output = opened(tmp_path)
    broken = part(tmp_path, 0)
    path = broken.splits["train"].bin
    path.write_bytes((path.read_bytes() + bytes(2))[: 8 + change])
    with pytest.raises(ValueError, match=f"{path}: {message} than its documents"):
        output.append(broken)
