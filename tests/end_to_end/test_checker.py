"""The checker against DeepSpeed itself, and a configuration from a well-known guide."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What deepspeed_facts_worker.py observes, in one process."""
    written = tmp_path_factory.mktemp("facts") / "facts.json"
    worker = Path(__file__).with_name("deepspeed_facts_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(written)],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    observed: dict[str, Any] = json.loads(written.read_text())
    return observed


EXPECTED: dict[str, Any] = {
    # Accepted without a word, and without an effect. Without gradient_clipping the limit is 1.
    "misspelt_keys": 1.0,
    "stage_3_keys_at_stage_2": "",
    "pipeline_section": "DeepSpeedEngine",
    "activation_checkpointing_is_only_stored": [False, False],
    "auto_precision": [False, "torch.float32"],
    "nvme_below_stage_3": ["", 0],
    "offloaded_parameters": {"2": None, "3": "not-nvme"},
    # Misread: postscale_gradients() is `not prescale_gradients`, given as the text "false".
    "text_for_a_boolean": False,
    "old_name_of_bf16": True,
    "sequence_parallel_ranks": 4 * 1 / 2,
    "unmanaged_accumulation": [1, 2],
    "monitor_axis": ["2", "4"],
    "kind_of_adam": {
        "Adam": "AdamW",
        "Adam, adam_w_mode false": "Adam",
        "AdamW, adam_w_mode false": "AdamW",
    },
    "sum_of_gradients": {"stage 0 None": "lost"}
    | {
        f"stage {stage}{offload} {dtype}": outcome
        for stage in (1, 2, 3)
        for offload in ("", " offload")
        for dtype, outcome in (("None", "lost"), ("fp32", "kept"))
    },
}

# Exceptions: the beginning, and a word of the message.
RAISED: dict[str, dict[str, tuple[str, str]]] = {
    "optimizer_params": {
        "max_grad_norm": ("ValueError", "gradient_clipping"),
        "unknown": ("TypeError", "beta"),
        "auto": ("TypeError", "str"),
        "unknown to CPU Adam": ("TypeError", "capturable"),
        "LBFGS": ("TypeError", "closure"),
        "sgd": ("AssertionError", "sgd is not a supported"),
        "muadam": ("UnboundLocalError", "MuAdam"),
    },
    "untested_optimizer": {
        "not allowed": ("AssertionError", "zero_allow_untested_optimizer"),
        "allowed": ("", ""),
        # zero_force_ds_cpu_optimizer asks nothing of an optimizer named in the configuration.
        "offload": ("", ""),
    },
    "contradictions": {
        "stage 0 fp32": ("NotImplementedError", "grad_accum_dtype"),
        "param_dtype": ("AssertionError", "param_dtype"),
        "prescale": ("AssertionError", "reduce scatter"),
        "predivide": ("AssertionError", "reduce scatter"),
        "no norm": ("ValueError", "gradient_clipping=0"),
        "legacy": ("Exception", "not supported"),
        "amp": ("DeepSpeedConfigError", "removed"),
    },
    "activation_checkpointing": {
        "cpu": ("RuntimeError", "0D"),
        "contiguous": ("AssertionError", "partitioned activations"),
        "cpu, partition": ("gradient", ""),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_deepspeed_does_what_the_checker_says(name: str, facts: dict[str, Any]) -> None:
    assert facts[name] == EXPECTED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", RAISED)
def test_deepspeed_raises_where_the_checker_says(name: str, facts: dict[str, Any]) -> None:
    for setting, (kind, word) in RAISED[name].items():
        found = facts[name][setting]
        assert found.startswith(kind), setting
        assert word in found, setting
        assert bool(found) == bool(kind), setting


@pytest.mark.slow
def test_one_rank_keeps_a_partitioned_activation_whole(facts: dict[str, Any]) -> None:
    assert facts["activation_checkpointing"]["kept of 64"] == 64


@pytest.mark.slow
def test_fp16_needs_a_cpu_that_has_it(facts: dict[str, Any]) -> None:
    supported, error = facts["fp16_on_a_cpu"]
    assert supported or error.startswith("ValueError: Type fp16 is not supported")


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("zero_allgather_partitions", {"engine.py": 1}),  # its accessor, which nobody calls
        ("disable_allgather", {"config.py": 3, "constants.py": 2}),
    ],
)
def test_settings_that_deepspeed_only_stores(name: str, uses: dict[str, int]) -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    found: Counter[str] = Counter()
    for path in Path(str(spec.origin)).parent.rglob("*.py"):
        found[path.name] += path.read_text(encoding="utf-8").count(name)
    assert +found == uses


# As guides to training large models have it, ZeRO-2 with everything that promises memory.
GUIDE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
    "optimizer": {
        "type": "AdamW",
        # Guides have no torch_adam; with it no extension is compiled here.
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 2},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 200_000_000,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 1_000_000,
        "contiguous_gradients": True,
    },
    "activation_checkpointing": {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "cpu_checkpointing": True,
    },
}


STEPS = ("--set", "training.max_steps=3")
SECTION = "deepspeed.activation_checkpointing"


def faults(done: Any) -> dict[str, str]:
    """What a run was refused for, and what each message says, by key."""
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    lines = [line.removeprefix("error: ").partition(": ") for line in done.stderr.splitlines()]
    return {key: message for key, _, message in lines if key.startswith("deepspeed.")}


@pytest.mark.slow
def test_the_guide_names_its_faults_at_once_and_trains_without_them(
    altered: Callable[..., Any], command: Any, losses: Callable[..., Any], tmp_path: Path
) -> None:
    assert list(faults(command.train(altered({"deepspeed": GUIDE}), *STEPS))) == [
        "deepspeed.zero_optimization.offload_param",
        SECTION,
        f"{SECTION}.partition_activations",
        f"{SECTION}.contiguous_memory_optimization",
        f"{SECTION}.cpu_checkpointing",
    ]
    changes = {"deepspeed": GUIDE, "deepspeed.activation_checkpointing": ...}
    fixed = altered({**changes, "deepspeed.zero_optimization.offload_param": ...})
    done = command.train(fixed, *STEPS)
    assert done.returncode == 0, done.stderr[-3000:]
    warned = [line for line in done.stdout.splitlines() if line.startswith("warning    deepspeed")]
    assert len(warned) == 2
    assert "overlap_comm: one data-parallel rank" in warned[0]
    assert "reduce_bucket_size=1,000,000: DeepSpeed allocates it whole" in warned[1]
    found = losses(fixed["training"]["run_folder"])
    assert list(found) == [1, 2, 3]
    assert all(0 < loss < 1.1 * math.log(67) for loss in found.values())

    # The other cure of its section: blocks that DeepSpeed checkpoints, as far as a CPU can.
    blocks = {"backend": "deepspeed", "policies": {"full": "all"}}
    changes = {"deepspeed": GUIDE, "deepspeed.zero_optimization.offload_param": ...}
    checkpointed = altered({**changes, "activation_checkpointing": blocks})
    options = faults(command.train(checkpointed, *STEPS))
    assert list(options) == [
        f"{SECTION}.partition_activations",
        f"{SECTION}.contiguous_memory_optimization",
        f"{SECTION}.cpu_checkpointing",
    ]
    assert all("leave it out" in message for message in options.values())
    left_out = altered(
        {
            **changes,
            "activation_checkpointing": blocks,
            **dict.fromkeys(options, ...),
            "training.run_folder": str(tmp_path / "checkpointed"),
        }
    )
    done = command.train(left_out, *STEPS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "blocks     full: 0-1" in done.stdout
    assert losses(left_out["training"]["run_folder"]) == found, "checkpointing changed the losses"


@pytest.mark.slow
def test_the_guide_keeps_its_activation_options_under_tensor_parallelism(
    altered: Callable[..., Any], command: Any, losses: Callable[..., Any]
) -> None:
    """As the checker's messages have it: set deepspeed.tensor_parallel.autotp_size."""
    changes: dict[str, Any] = {
        "deepspeed": GUIDE,
        "deepspeed.zero_optimization.offload_param": ...,
        "activation_checkpointing": {"backend": "deepspeed", "policies": {"full": "all"}},
    }
    options = faults(command.train(altered(changes), *STEPS))
    assert "deepspeed.tensor_parallel.autotp_size" in options[f"{SECTION}.partition_activations"]
    split = altered({**changes, "deepspeed.tensor_parallel": {"autotp_size": 2}})
    assert all(split["deepspeed"]["activation_checkpointing"].values())
    done = command.train(split, *STEPS, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    found = losses(split["training"]["run_folder"])
    assert list(found) == [1, 2, 3]
    assert all(0 < loss < 1.1 * math.log(67) for loss in found.values())


@pytest.mark.slow
def test_check_prints_warnings_after_the_config_and_refuses_mistakes(
    altered: Callable[..., Any], command: Any
) -> None:
    done = command.train(altered({"deepspeed.zero_optimization": {"stage": 1}}), "--check")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith(
        "warning: deepspeed.zero_optimization.stage=1: partitions nothing"
    )
    done = command.train(altered({"deepspeed.gradient_cliping": 0.5}), "--check")
    assert done.returncode == 2
    assert "did you mean 'gradient_clipping'?" in done.stderr


UNCHECKED = """
import sys
from configs import checks
checks._backend = lambda *_: []
import train
from training.engine import leave
leave(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_deepspeeds_checkpoints_crash_at_zero_3_without_dropout(
    altered: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    raw = altered(
        {
            "model.dropout": 0.0,
            "training.max_steps": 1,
            "deepspeed.zero_optimization": {"stage": 3},
            "activation_checkpointing": {"backend": "deepspeed", "policies": {"full": "all"}},
        }
    )
    path.write_text(json.dumps(raw))
    done = command.python("-c", UNCHECKED, "--config", str(path), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1
    assert "must match the size of tensor" in done.stderr
