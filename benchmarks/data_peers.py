"""Other ways from JSON lines to tokens on disk, each a command of its own for benchmarks/data.py.

    python -m benchmarks.data_peers datasets FOLDER OUTPUT

FOLDER holds tokenizer.json and *.jsonl; documents end with the token 0, as ours do. Nothing that a
command does not need is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

END_OF_DOCUMENT = 0
WORKERS = 2


def with_datasets(folder: Path, output: Path) -> None:
    """load_dataset and a batched map in two processes, which write Arrow files."""
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, folder.glob("*.jsonl")))
    cache = str(output)
    documents = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
    documents.map(
        encode_rows,
        fn_kwargs={"tokenizer_json": str(folder / "tokenizer.json")},
        batched=True,
        num_proc=WORKERS,
        remove_columns=documents.column_names,
        features=datasets.Features({"ids": datasets.List(datasets.Value("int32"))}),
        cache_file_name=str(output / "mapped.arrow"),
    )


_tokenizers: dict[str, Any] = {}


def encode_rows(rows: dict[str, list[str]], tokenizer_json: str) -> dict[str, list[list[int]]]:
    from tokenizers import Tokenizer

    if tokenizer_json not in _tokenizers:
        _tokenizers[tokenizer_json] = Tokenizer.from_file(tokenizer_json)
    encodings = _tokenizers[tokenizer_json].encode_batch_fast(rows["text"])
    return {"ids": [[*encoding.ids, END_OF_DOCUMENT] for encoding in encodings]}


def with_datatrove(folder: Path, output: Path) -> None:
    """A reader and a tokenizing writer in two processes, a file each."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    LocalPipelineExecutor(
        [
            JsonlReader(str(folder), glob_pattern="*.jsonl"),
            DocumentTokenizer(
                str(output / "tokens"),
                str(folder / "tokenizer.json"),
                eos_token="<|endoftext|>",
                shuffle_documents=False,
                save_final_metadata=False,
            ),
        ],
        tasks=WORKERS,
        workers=WORKERS,
        logging_dir=str(output / "logs"),
        start_method="spawn",
    ).run()


def main() -> None:
    name, folder, output = sys.argv[1:]
    {"datasets": with_datasets, "datatrove": with_datatrove}[name](Path(folder), Path(output))


if __name__ == "__main__":
    main()
