from __future__ import annotations

import itertools
import math
import os
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.dataset import Corpus
from data.token_file import TokenFile, TokenFileWriter, token_dtype, unigram_entropy

WriteCorpus = Callable[..., Path]
DOCUMENTS = [[5, 6, 2], [2], [7, 65_534, 9, 10, 2]]


def parse(prefix: Path) -> tuple[tuple[object, ...], list[int], list[int], list[int], bytes]:
    """Reads Megatron's layout with struct alone, as its documentation and source describe it."""
    index = Path(f"{prefix}.idx").read_bytes()
    header = struct.unpack("<9sQBQQ", index[:34])
    sequences, entries = header[3:]
    sizes = list(struct.unpack_from(f"<{sequences}i", index, 34))
    pointers = list(struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences))
    documents = list(struct.unpack_from(f"<{entries}q", index, 34 + 12 * sequences))
    assert len(index) == 34 + 12 * sequences + 8 * entries
    return header, sizes, pointers, documents, Path(f"{prefix}.bin").read_bytes()


def write_index(prefix: Path, sizes: list[int], documents: list[int], code: int, item: int) -> None:
    pointers = [item * sum(sizes[:i]) for i in range(len(sizes))]
    Path(f"{prefix}.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sizes), len(documents))
        + struct.pack(f"<{len(sizes)}i{len(pointers)}q", *sizes, *pointers)[: 4 * len(sizes)]
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


@pytest.mark.parametrize(
    ("vocabulary_size", "code", "letter"), [(65_535, 8, "H"), (65_536, 4, "i"), (200_000, 4, "i")]
)
def test_layout_field_by_field(
    write_corpus: WriteCorpus, vocabulary_size: int, code: int, letter: str
) -> None:
    prefix = write_corpus(DOCUMENTS, vocabulary_size)
    header, sizes, pointers, documents, content = parse(prefix)
    assert header == (b"MMIDIDX\x00\x00", 1, code, 3, 4)
    assert sizes == [3, 1, 5]
    item = struct.calcsize(letter)
    assert pointers == [0, 3 * item, 4 * item]
    assert documents == [0, 1, 2, 3]
    assert list(struct.unpack(f"<9{letter}", content)) == list(itertools.chain(*DOCUMENTS))


def test_index_longer_than_a_block(
    write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.token_file._BLOCK", 4)
    prefix = write_corpus([[i] * (i % 3) + [2] for i in range(13)], 100)
    _, sizes, pointers, documents, _ = parse(prefix)
    assert sizes == [i % 3 + 1 for i in range(13)]
    assert pointers == [2 * sum(sizes[:i]) for i in range(13)]
    assert documents == list(range(14))
    assert (
        np.concatenate(list(TokenFile(prefix).blocks())).tolist()
        == TokenFile(prefix).tokens(0, sum(sizes)).tolist()
    )


def test_pointers_beyond_32_bits(tmp_path: Path) -> None:
    # DP-06: lengths alone, as if the tokens had been written.
    with TokenFileWriter(tmp_path / "x", 70_000) as writer:
        writer._lengths.write(struct.pack("<3i", *[2**31 - 1] * 3))
    _, sizes, pointers, documents, _ = parse(tmp_path / "x")
    assert sizes == [2**31 - 1] * 3
    assert pointers == [0, 4 * (2**31 - 1), 8 * (2**31 - 1)]
    assert documents == [0, 1, 2, 3]


def test_reader(write_corpus: WriteCorpus) -> None:
    file = TokenFile(write_corpus(DOCUMENTS, 65_535))
    assert (file.document_count, file.token_count, file.dtype) == (3, 9, np.uint16)
    assert [file.document(i).tolist() for i in range(3)] == DOCUMENTS
    assert file.tokens(2, 4).tolist() == [2, 2, 7, 65_534]
    assert file.tokens(9, 0).tolist() == []
    for start, count in [(-1, 2), (8, 2), (9, 1), (3, -1)]:
        with pytest.raises(IndexError, match="of 9"):
            file.tokens(start, count)
    with pytest.raises(IndexError, match="document 3 of 3"):
        file.document(3)


@pytest.mark.parametrize(
    ("code", "letter", "values"),
    [(1, "B", [1, 255]), (2, "b", [1, 127]), (3, "h", [1, 32_767]), (4, "i", [1, 2**31 - 1]),
     (5, "q", [1, 2**40]), (8, "H", [1, 65_535])],
)  # fmt: skip
def test_reads_all_integer_types(tmp_path: Path, code: int, letter: str, values: list[int]) -> None:
    write_index(tmp_path / "x", [1, 1], [0, 2], code, struct.calcsize(letter))
    (tmp_path / "x.bin").write_bytes(struct.pack(f"<2{letter}", *values))
    file = TokenFile(tmp_path / "x")  # one document of two sequences
    assert file.document_count == 1
    assert file.document(0).tolist() == values == file.tokens(0, 2).tolist()


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for bad in (100, -1, 65_537):
        with (
            pytest.raises(ValueError, match=r"x\.bin: token ids .* do not fit a vocabulary of 100"),
            TokenFileWriter(tmp_path / "x", 100) as writer,
        ):
            writer.append(np.array([1, bad, 2]), np.array([3], np.int32))
        assert not (tmp_path / "x.idx").exists()
    assert token_dtype(65_535) == np.uint16
    assert token_dtype(65_536) == np.int32


def test_truncated_and_damaged_files(write_corpus: WriteCorpus, tmp_path: Path) -> None:
    prefix = write_corpus(DOCUMENTS, 1 << 16)
    index, content = (Path(f"{prefix}.{kind}").read_bytes() for kind in ("idx", "bin"))

    def refused(kind: str, damaged: bytes, message: str) -> None:
        Path(f"{prefix}.{kind}").write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"corpus\.{kind}: {message}"):
            TokenFile(prefix)
        Path(f"{prefix}.idx").write_bytes(index)
        Path(f"{prefix}.bin").write_bytes(content)

    for cut in (1, 4, 16):
        refused("bin", content[:-cut], f"{36 - cut} bytes, but its index describes 36: truncated")
    refused("bin", content + b"\0", "37 bytes, but its index describes 36")
    for cut in (1, 8, 60):
        refused("idx", index[:-cut], rf"{102 - cut} bytes, but its header \(3 sequences, 4 .*102")
    refused("idx", index[:20], "20 bytes, shorter than its header")
    refused("idx", b"", "not a Megatron index")
    refused("idx", b"TNTIDX\0\0\1" + index[9:], "not a Megatron index")
    refused("idx", index[:9] + struct.pack("<Q", 2) + index[17:], "format version 2, expected 1")
    refused("idx", index[:17] + b"\7" + index[18:], "dtype code 7 is not an integer type")
    # DP-05: a dtype changed by hand contradicts the pointers.
    Path(f"{prefix}.idx").write_bytes(index[:17] + b"\10" + index[18:])
    with pytest.raises(ValueError, match="36 bytes, but its index describes 26"):
        TokenFile(prefix)
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(FileNotFoundError, match=r"corpus\.idx"):
        TokenFile(prefix)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    size = 2**31 - 1  # tokens of each of three documents: 12.9 GB, none of it on the disk
    write_index(tmp_path / "x", [size] * 3, [0, 1, 2, 3], 8, 2)
    with (tmp_path / "x.bin").open("wb") as stream:
        stream.truncate(6 * size)
        stream.seek(4 * size)
        stream.write(struct.pack("<2H", 11, 12))
        stream.seek(6 * size - 6)
        stream.write(struct.pack("<3H", 13, 14, 15))
    file = TokenFile(tmp_path / "x")
    assert file.token_count == 3 * size
    assert file.document(2)[:2].tolist() == [11, 12]
    assert file.document(2)[-3:].tolist() == [13, 14, 15]
    assert file.tokens(2 * size - 1, 3).tolist() == [0, 11, 12]
    corpus = Corpus(tmp_path / "x", 4, 0, vocabulary_size=100, shuffle=False)
    last = (3 * size - 1) // 4 - 1
    # 3 * size - 1 = 4 * samples: the last label of the last sample is the last token of the file.
    assert (3 * size - 1) % 4 == 0
    assert corpus.sample(last).tolist() == [0, 0, 13, 14, 15]


def test_a_trillion_tokens(tmp_path: Path) -> None:
    sequences, length = 500_000_000, 2000
    item = 2
    with (tmp_path / "x.idx").open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, sequences + 1))
        stream.seek(34 + 4 * (sequences - 1))
        stream.write(struct.pack("<i", length))
        stream.seek(34 + 4 * sequences + 8 * (sequences - 1))
        stream.write(struct.pack("<q", item * length * (sequences - 1)))
        stream.seek(34 + 12 * sequences + 8 * sequences)
        stream.write(struct.pack("<q", sequences))
    with (tmp_path / "x.bin").open("wb") as stream:
        stream.truncate(item * sequences * length)
        stream.seek(item * sequences * length - 6)
        stream.write(struct.pack("<3H", 7, 8, 9))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before, started = resident(), time.perf_counter()
    corpus = Corpus(tmp_path / "x", 1023, 0, vocabulary_size=100)
    assert time.perf_counter() - started < 1
    assert corpus.file.token_count == 10**12
    assert corpus.file.document_count == sequences
    for n in range(20):
        corpus.sample(10**9 + n)
    # A sample brings in no more than the pages that the system reads ahead, 128 KiB.
    assert resident() - before < 8 << 20
    in_order = Corpus(tmp_path / "x", 999, 0, vocabulary_size=100, shuffle=False)
    assert in_order.samples_per_epoch == (10**12 - 1) // 999
    assert (10**12 - 1) % 999 == 0
    assert in_order.sample(in_order.samples_per_epoch - 1)[-3:].tolist() == [7, 8, 9]


def test_fingerprint_without_a_manifest(write_corpus: WriteCorpus) -> None:
    one = TokenFile(write_corpus([[1, 2, 3], [4]], 10, "one")).fingerprint
    assert TokenFile(write_corpus([[1, 2, 3], [4]], 10, "copy")).fingerprint == one
    for number, other in enumerate([[[1, 2, 4], [4]], [[1, 2], [3, 4]], [[1, 2, 3, 4]]]):
        assert TokenFile(write_corpus(other, 10, f"other{number}")).fingerprint != one


def test_unigram_entropy(write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.token_file._BLOCK", 3)
    file = TokenFile(write_corpus([[0, 1, 0, 1], [5, 5, 5, 5]], 8))
    # Shares 1/4, 1/4, 1/2: (2 ln 4) / 4 + (ln 2) / 2.
    assert unigram_entropy(file, 8) == pytest.approx(1.5 * math.log(2), rel=1e-12)
    with pytest.raises(ValueError, match="do not fit a vocabulary of 5"):
        unigram_entropy(file, 5)


def test_an_empty_file_can_be_opened(write_corpus: WriteCorpus) -> None:
    file = TokenFile(write_corpus([], 10))
    assert (file.document_count, file.token_count) == (0, 0)
    assert os.path.getsize(f"{file.bin_path}") == 0
    with pytest.raises(ValueError, match="holds no tokens"):
        unigram_entropy(file, 10)


def test_rows(write_corpus: WriteCorpus) -> None:
    file = TokenFile(write_corpus([list(range(50))], 100))
    assert file.rows(np.array([3, 46, 0]), 4).tolist() == [
        [3, 4, 5, 6],
        [46, 47, 48, 49],
        [0, 1, 2, 3],
    ]
    assert file.rows(np.array([49]), 1).tolist() == [[49]]
    with pytest.raises(IndexError):
        file.rows(np.array([47]), 4)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux to empty the cache")
def test_rows_from_a_cold_cache_are_the_same(
    write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 15, 500_000)
    file = TokenFile(write_corpus([tokens], 1 << 15))
    starts = np.random.default_rng(1).integers(0, 490_000, (200, 8))
    faults = iter(range(10**6))
    monkeypatch.setattr("data.token_file._faults_from_disk", lambda: next(faults))
    advised = []
    advise = TokenFile._advise
    monkeypatch.setattr(
        TokenFile, "_advise", lambda *given: (advised.append(given[1]), advise(*given))
    )
    for number, batch in enumerate(starts):
        if number % 50 == 0:
            with file.bin_path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        expected = [tokens[start : start + 3000] for start in batch]
        assert np.array_equal(file.rows(batch, 3000), expected)
    assert len(advised) == 8 * 199, "from the first wait for the disk on"


def test_a_hundred_corpora_of_a_billion_documents_open_at_once(tmp_path: Path) -> None:
    sequences, length, item = 10**9, 300, 2  # 60 TB of the 128 that can be mapped
    with (tmp_path / "x.idx").open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, sequences + 1))
        stream.seek(34 + 4 * (sequences - 1))
        stream.write(struct.pack("<i", length))
        stream.seek(34 + 4 * sequences + 8 * (sequences - 1))
        stream.write(struct.pack("<q", item * length * (sequences - 1)))
        stream.seek(34 + 12 * sequences + 8 * sequences)
        stream.write(struct.pack("<q", sequences))
    with (tmp_path / "x.bin").open("wb") as stream:
        stream.truncate(item * sequences * length)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    files, before = len(os.listdir("/proc/self/fd")), resident()
    corpora = [Corpus(tmp_path / "x", 2048, seed, vocabulary_size=100) for seed in range(100)]
    assert len(os.listdir("/proc/self/fd")) - files <= 100
    assert resident() - before < 16 << 20
    assert {corpus.samples_per_epoch for corpus in corpora} == {(length * sequences - 1) // 2048}
