"""Text to tokenizer to tokens to a trained model to text, by the commands of the README."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_text_in_text_out(altered: Callable[..., Any], command: Any, tmp_path: Path) -> None:
    source, model, prepared = tmp_path / "text.jsonl", tmp_path / "t.model", tmp_path / "prepared"
    lines = [f"def f{n}(x):\n    return x + {n}\n" for n in range(300)]
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    train = ["-m", "data.tokenizer", "train", "--source", str(source), "--vocab-size", "300"]
    done = command.python(*train, "--output", str(model))
    assert done.returncode == 0, done.stderr
    prepare = ["-m", "data.prepare", "--source", str(source), "--tokenizer", str(model)]
    done = command.python(*prepare, "--output", str(prepared), "--validation-fraction", "0.2")
    assert done.returncode == 0, done.stderr

    texts = []
    for ranks, zero in ((1, {"stage": 0}), (1, {"stage": 2}), (2, {"stage": 3})):
        folder = str(tmp_path / f"zero{zero['stage']}")
        config = altered(
            {
                "model.vocabulary_size": 300,
                "model.dropout": 0.0,
                "data.train": [{"path": str(prepared / "train")}],
                "data.validation": str(prepared / "validation"),
                "training.run_folder": folder,
                "deepspeed.zero_optimization": zero,
            }
        )
        done = command.train(config, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        generate = ["-m", "training.generate", "--checkpoint", folder, "--prompt", "def f"]
        done = command.python(*generate, "--temperature", "0", "--max-new-tokens", "12")
        assert done.returncode == 0, done.stderr[-3000:]
        texts.append(done.stdout)
    assert texts[0].startswith("def f")
    assert len(texts[0]) > len("def f\n")
    assert texts[1] == texts[2] == texts[0], "the same weights whatever the ZeRO stage"

    foreign = altered({"data.validation": str(prepared / "validation")})
    done = command.train(foreign)
    assert done.returncode == 2
    assert "300" in done.stderr
    assert "67" in done.stderr

    absent = command.python("-m", "training.generate", "--checkpoint", "configs", "--prompt", "x")
    assert absent.returncode == 2
    assert "not a run folder" in absent.stderr
    assert "Traceback" not in absent.stderr
