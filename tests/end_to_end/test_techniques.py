"""The configs of configs/techniques/ train the quickstart's model, or say why they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
TECHNIQUES = sorted((CONFIGS / "techniques").glob("*.json"))
NEEDS_A_GPU = {
    "expandable_segments": "no caching allocator",
    "fp16": "this trainer has no float16 on a CPU",
    "offload_activations": "a CPU's",
}

# In float32 these change where things are and when they are computed, and nothing else.
RELATIVE = 2e-5
BF16 = {"bf16", "bf16_states"}
BF16_RELATIVE = 0.01


def test_techniques_are_the_quickstart_but_for_what_they_show() -> None:
    quickstart = json.loads((CONFIGS / "quickstart.json").read_text())
    for path in TECHNIQUES:
        technique = json.loads(path.read_text())
        assert technique["training"].pop("run_folder") == f"runs/{path.stem}"
        for key in ("loss", "compile_blocks", "expandable_segments"):
            technique["training"].pop(key, None)
        for section in ("model", "data"):
            assert technique[section] == quickstart[section], path
        expected = {k: v for k, v in quickstart["training"].items() if k != "run_folder"}
        assert technique["training"] == expected, path
        changed = {
            key
            for key in technique["deepspeed"].keys() | quickstart["deepspeed"].keys()
            if technique["deepspeed"].get(key) != quickstart["deepspeed"].get(key)
        }
        assert changed <= {
            "zero_optimization",
            "bf16",
            "fp16",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        }, path


@pytest.fixture
def shrunk(corpus: Path) -> Callable[[Path], dict[str, Any]]:
    """A configuration at the size of a test, on the test's corpus."""

    def shrink(path: Path) -> dict[str, Any]:
        config = load_config(path).model_dump()
        config["data"] = {
            "train": [{"path": str(corpus / "train")}],
            "validation": str(corpus / "validation"),
        }
        config["training"] |= {"max_steps": 3, "sequence_length": 16}
        config["deepspeed"]["scheduler"]["params"]["warmup_num_steps"] = 1
        config["deepspeed"]["optimizer"]["params"]["torch_adam"] = True  # nothing to compile
        return config

    return shrink


@pytest.mark.slow
def test_they_train_alike(
    shrunk: Callable[[Path], dict[str, Any]], train_all: Callable[..., Any]
) -> None:
    paths = [path for path in TECHNIQUES if path.stem not in NEEDS_A_GPU]
    configs = {path.stem: shrunk(path) for path in [CONFIGS / "quickstart.json", *paths]}
    results = train_all(configs, 1)
    expected = results["quickstart"]["losses"]
    assert expected[2] < expected[0]
    for name, result in results.items():
        tolerance = BF16_RELATIVE if name in BF16 else RELATIVE
        assert result["losses"] == pytest.approx(expected, rel=tolerance), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS_A_GPU)
def test_what_needs_a_gpu_says_so_at_once(name: str, command: Any) -> None:
    done = command.python("train.py", "--config", f"configs/techniques/{name}.json")
    assert done.returncode == 2
    assert NEEDS_A_GPU[name] in done.stderr
    assert "Traceback" not in done.stderr
