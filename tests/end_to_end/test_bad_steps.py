"""Nothing non-finite reaches weights or optimizer states, on any rank, whatever holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = str(Path(__file__).with_name("bad_steps_worker.py"))

BF16 = {"deepspeed.bf16": {"enabled": True}}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": BF16,
    "offload": {
        "deepspeed.zero_optimization.offload_optimizer": {"device": "cpu"},
        "deepspeed.optimizer.params.torch_adam": True,
    },
    "tensor parallel": {"deepspeed.tensor_parallel": {"autotp_size": 2}},
    "no norm": {
        "deepspeed.zero_optimization.compute_grad_norm": False,
        "deepspeed.gradient_clipping": 0.0,
    },
    "not clipped": {"deepspeed.gradient_clipping": 0.0},
    "full": {"activation_checkpointing": {"policies": {"full": "all"}}},
    "reentrant": {
        "activation_checkpointing": {
            "backend": "deepspeed", "reentrant": True, "policies": {"full": "all"}
        }
    },
}  # fmt: skip
CASES = [
    *((way, stage, "gradient, first") for way in ("float32", "bf16") for stage in range(4)),
    *(("float32", stage, "forward, first") for stage in (0, 3)),
    ("float32", 1, "forward, last"),
    *(("float32", stage, "loss, first") for stage in (0, 2)),
    *(("float32", stage, "spike") for stage in (0, 2, 3)),
    *(("offload", stage, "gradient, first") for stage in (2, 3)),
    *(("no norm", stage, "gradient, first") for stage in (1, 2)),
    ("not clipped", 0, "gradient, first"),
    ("full", 3, "gradient, first"),
    ("reentrant", 2, "gradient, first"),
    # Last: DeepSpeed keeps its groups for the engines after it.
    *(("tensor parallel", stage, "gradient, first") for stage in (0, 2, 3)),
]


@pytest.mark.slow
def test_a_bad_step_changes_nothing_and_names_its_block(
    altered: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    configs = {}
    for way, stage, kind in CASES:
        name = f"{way}, zero {stage}: {kind}"
        changes = {
            "training.max_steps": 5,
            "training.spike_deviations": 5.0,
            "training.run_folder": str(tmp_path / name),
            "deepspeed.zero_optimization.stage": stage,
        }
        configs[name] = altered(changes | WAYS[way]), kind
    given, written = tmp_path / "configs.json", tmp_path / "found.json"
    given.write_text(json.dumps(configs))
    done = command.python(
        WORKER, str(given), str(written), ranks=2, env={"OMP_NUM_THREADS": "1"}, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(written.read_text())
    differing = "step 7: blocks.1.mlp.up.weight of rank 0, 1 differs"
    assert found.keys() == configs.keys()
    for name, ranks in found.items():
        for rank in ranks:
            digests = rank["digests"]
            assert digests[2] == digests[1], f"{name}: step 3 changed something"
            assert len(set(digests)) == 4, name
            assert rank["finite"], name
            assert rank.get("differing", differing).startswith(differing), name
            assert rank["skipped"] == [0, 0, 1, 1, 1], name
            # The learning rate of step n is that of step n: warm-up over 4 steps to 0.01.
            assert rank["lrs"][:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01]), name
        check_report(name, ranks, tmp_path / name)
    same = [ranks for name, ranks in found.items() if name.startswith(("float32", "full", "reent"))]
    for ranks in same:
        # What is left of a bad step in a buffer would show in the steps after it.
        for step in (0, 1, 3, 4):
            assert ranks[0]["losses"][step] == pytest.approx(same[0][0]["losses"][step], rel=1e-5)


def check_report(name: str, ranks: list[Any], folder: Path) -> None:
    kind = name.split(": ")[1]
    (report,) = json.loads((folder / "bad_steps.json").read_text())["bad_steps"]
    assert report["step"] == 3, name
    if kind == "spike":
        assert "is a spike, from 1.3" in report["reason"], "1.05 + 5 deviations of 0.05"
        assert not report["findings"]
        return
    assert math.isfinite(ranks[0]["losses"][2]) == ("gradient" in kind), name
    first = report["findings"][0]
    parallel = name.startswith("tensor")
    expected = {
        "gradient": ("block 1", "backward", "gradient of its input"),
        "forward": ("block 1", "forward", "its output"),
        "loss": ("head", "forward", "the loss"),
    }[kind.split(",")[0]]
    assert (first["place"], first["when"], first["tensors"][0]) == expected, name
    assert first["micro_batch"] == ("last" in kind), name
    assert first["rank"] == 1 or parallel, name
    if not parallel:
        # Of step 3: samples 16 to 23, two ranks with two micro-batches of two each.
        start = 22 if "last" in kind else 18
        assert first["samples"] == [start, start + 1], name
        assert len(report["findings"]) == 1, name
    assert first["text"][0].startswith("tokens ["), name
