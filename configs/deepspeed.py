"""The DeepSpeed section of a run, resolved: "auto" decided, batch sizes completed, optimizer named.

DeepSpeed drops "auto" values without a word, takes the slow or uncompiled optimizer by default and
asserts on batch sizes with a traceback. Here each is settled, or refused with the reason, before
DeepSpeed sees it; configs/checks.py refuses what it would ignore, misread or crash on.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from configs import checks
from configs.reading import ConfigError
from configs.schedule import resolve_scheduler
from configs.schema import RunConfig
from model.config import ModelConfig

# Here "auto" is DeepSpeed's own word.
AUTO_IS_A_VALUE = {
    "deepspeed.data_types.keep_in_fp32_modules",
    "deepspeed.zero_optimization.zenflow.select_interval",
    "deepspeed.zero_optimization.zenflow.select_strategy",
    "deepspeed.zero_optimization.zenflow.update_interval",
}
REDUCE_BUCKET_SIZE = 500_000_000
"""DeepSpeed's default in elements; a test compares it with the installed one."""
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Hardware:
    """What resolution depends on: ranks, and what one rank's device can compute."""

    world_size: int
    device: str
    """"cpu" or "cuda"."""
    bf16: bool
    """Whether the device multiplies bfloat16 matrices in hardware."""


def resolve(config: RunConfig, hardware: Hardware, *, ask_deepspeed: bool = True) -> dict[str, Any]:
    """The dictionary handed to deepspeed.initialize.

    Without `ask_deepspeed` nothing is compared with the installed DeepSpeed, which takes seconds to
    import: whoever only predicts need not have it.

    Raises:
        ConfigError: every mistake found, each naming its key.
    """
    section = copy.deepcopy(config.deepspeed)
    problems = _numbers_in_quotes(section, "deepspeed")
    problems += _resolve_batch(section, hardware.world_size, tensor_parallel_size(section))
    problems += _resolve_precision(section, hardware)
    problems += _resolve_zero(section, config.model.parameter_count())
    problems += _check_tensor_parallel(section, config.model, hardware.world_size)
    problems += _resolve_clipping(section)
    problems += _resolve_optimizer(section)
    problems += resolve_scheduler(section, config.training.max_steps)
    problems += _leftover_auto(section, "deepspeed")
    types = section.get("data_types", {})
    if not isinstance(types, dict):
        problems.append(f"deepspeed.data_types: expected an object {{...}}, got {types!r}")
    if config.training.expandable_segments and hardware.device == "cpu":
        problems.append(
            "training.expandable_segments: the segments are those of CUDA's allocator, and a CPU "
            "has no caching allocator; leave it out"
        )
    named = {line.partition(":")[0] for line in problems}
    checked = checks.problems_of(config, section, hardware.device) if ask_deepspeed else []
    problems += [line for line in checked if line.partition(":")[0] not in named]
    if problems:
        raise ConfigError(problems)
    return section


def warnings_of(config: RunConfig, section: Mapping[str, Any], hardware: Hardware) -> list[str]:
    """Settings of a resolved section that are legal and do nothing useful, or surprise."""
    return checks.warnings_of(config, section, hardware.world_size)


def _numbers_in_quotes(node: Any, path: str) -> list[str]:
    """DeepSpeed does not type its optimizer's parameters: "3e-4" would fail deep inside a step."""
    if isinstance(node, dict):
        return [line for k, v in node.items() for line in _numbers_in_quotes(v, f"{path}.{k}")]
    if isinstance(node, list):
        return [line for i, v in enumerate(node) for line in _numbers_in_quotes(v, f"{path}.{i}")]
    if isinstance(node, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", node):
        return [f'{path}: "{node}" is text; write the number without quotes']
    return []


def precision(section: dict[str, Any]) -> torch.dtype:
    """The parameters' dtype under a resolved DeepSpeed section."""
    if section.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if section.get("fp16", {}).get("enabled") else torch.float32


def tensor_parallel_size(section: Mapping[str, Any]) -> int:
    """Ranks that hold one replica of the model together; 1 where the setting is not a size."""
    size = _value(section, "tensor_parallel", "autotp_size")
    return size if isinstance(size, int) and size > 0 else 1


def _check_tensor_parallel(
    section: dict[str, Any], model: ModelConfig, world_size: int
) -> list[str]:
    """Equal shares only: DeepSpeed would cut unequal ones, and leave ranks without any heads."""
    block, key = section.get("tensor_parallel", {}), "deepspeed.tensor_parallel"
    if not isinstance(block, dict) or block.keys() - {"autotp_size"}:
        return [
            f'{key}: expected {{"autotp_size": N}} and no other key; which layers are cut is '
            "declared in model/partition.py"
        ]
    size = block.get("autotp_size", 0)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        return [f"{key}.autotp_size: expected the ranks that share one replica, got {size!r}"]
    if size <= 1:
        return []
    wholes = {
        "the number of ranks": world_size,
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.mlp_width": model.mlp_width,
    }
    problems = [
        f"{key}.autotp_size={size} does not divide {name} ({whole})"
        for name, whole in wholes.items()
        if whole % size
    ]
    half = any(_value(section, kind, "enabled") is True for kind in ("bf16", "fp16"))
    if half and _value(section, "zero_optimization", "stage") in (None, 0):
        problems.append(
            f"{key}: in 16 bits at ZeRO stage 0 DeepSpeed leaves all but the first rank's "
            "gradients out of the norm it clips by; set zero_optimization.stage to 1"
        )
    return problems


def _value(section: Mapping[str, Any], block: str, key: str) -> Any:
    """None where the block is missing, or is none: that is reported elsewhere."""
    found = section.get(block)
    return found.get(key) if isinstance(found, dict) else None


def _resolve_batch(section: dict[str, Any], ranks: int, tensor_parallel: int) -> list[str]:
    """train = micro x accumulation x ranks: complete it from what is given, as DeepSpeed does.

    Ranks are data-parallel ones here: those that share a replica read the same samples.
    """
    world_size = max(1, ranks // tensor_parallel)
    given = {key: section.pop(key) for key in BATCH_KEYS if key in section}
    given = {key: value for key, value in given.items() if value != "auto"}
    problems = [
        f"deepspeed.{key}: expected a positive integer, got {value!r}"
        for key, value in given.items()
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0
    ]
    if problems:
        return problems
    train, micro, accumulation = (given.get(key) for key in BATCH_KEYS)
    if micro is None:
        if train is None:
            return [f"deepspeed: give {BATCH_KEYS[0]} or {BATCH_KEYS[1]}"]
        micro = max(1, train // ((accumulation or 1) * world_size))
    if accumulation is None:
        accumulation = max(1, (train or 0) // (micro * world_size))
    product = micro * accumulation * world_size
    if train not in (None, product):
        alone = "; started without a launcher, there is only 1 rank" if ranks == 1 else ""
        return [_batch_problem(train, micro, accumulation, world_size) + alone]
    section.update(zip(BATCH_KEYS, (product, micro, accumulation), strict=True))
    return []


def _batch_problem(train: int, micro: int, accumulation: int, world_size: int) -> str:
    product = micro * accumulation * world_size
    if train % (micro * world_size) == 0:
        fix = f"set gradient_accumulation_steps to {train // (micro * world_size)}"
    else:
        fix = f"set train_batch_size to a multiple of {micro * world_size}, such as {product}"
    return (
        f"deepspeed.train_batch_size={train} is not train_micro_batch_size_per_gpu={micro} x "
        f"gradient_accumulation_steps={accumulation} x ranks={world_size} (= {product}); "
        f"{fix}"
    )


def _resolve_precision(section: dict[str, Any], hardware: Hardware) -> list[str]:
    """ "auto" in either block: bf16 where the hardware has it, else fp16 on a GPU, else float32."""
    given = {kind: section.get(kind, {}) for kind in ("bf16", "fp16")}
    blocks = {kind: block for kind, block in given.items() if isinstance(block, dict)}
    problems = [
        f'deepspeed.{kind}: expected an object such as {{"enabled": true}}, got {block!r}'
        for kind, block in given.items()
        if kind not in blocks
    ]
    wanted = {kind: block.get("enabled", False) for kind, block in blocks.items()}
    if "auto" in wanted.values():
        best = ("bf16" if hardware.bf16 else "fp16") if hardware.device == "cuda" else None
        for kind in blocks:
            section[kind] = {**blocks[kind], "enabled": kind == best}
        return problems
    problems += [
        f'deepspeed.{kind}.enabled: expected true, false or "auto", got {value!r}'
        for kind, value in wanted.items()
        if not isinstance(value, bool)
    ]
    if all(wanted.get(kind) is True for kind in given):
        problems.append("deepspeed: bf16 and fp16 are both enabled; a run has one precision")
    if wanted.get("fp16") is True and hardware.device == "cpu":
        problems.append(
            "deepspeed.fp16.enabled: this trainer has no float16 on a CPU: DeepSpeed takes it only "
            'where torch multiplies it in hardware; use "auto" (float32 here) or bf16'
        )
    return problems


def _resolve_zero(section: dict[str, Any], parameters: int) -> list[str]:
    """Make the bucket in which gradients are gathered for reduction no larger than all of them.

    DeepSpeed allocates it whole, 2 GB of float32 by default.
    """
    block = section.setdefault("zero_optimization", {"stage": 0})
    if not isinstance(block, dict):
        return [
            f'deepspeed.zero_optimization: expected an object such as {{"stage": 2}}, got {block!r}'
        ]
    if block.get("stage", 0) in (1, 2, 3) and block.get("reduce_bucket_size", "auto") == "auto":
        block["reduce_bucket_size"] = min(REDUCE_BUCKET_SIZE, parameters)
    return []


def _resolve_clipping(section: dict[str, Any]) -> list[str]:
    """Without the key DeepSpeed clips at 1.0; written down, so that every stage does the same."""
    limit = section.setdefault("gradient_clipping", 1.0)
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 <= limit < math.inf:
        return [
            "deepspeed.gradient_clipping: expected a norm to clip at, or 0 for no clipping, "
            f"got {limit!r}"
        ]
    return []


def offloads_optimizer(section: Mapping[str, Any]) -> bool:
    """Whether optimizer states and the update live in host memory or on NVMe."""
    offload = _value(section, "zero_optimization", "offload_optimizer")
    return isinstance(offload, dict) and offload.get("device", "none") != "none"


def _resolve_optimizer(section: dict[str, Any]) -> list[str]:
    """Name the implementation: what DeepSpeed would pick is slower, or needs a compiler.

    Without offload, torch's fused kernel, 3 times faster than its foreach one on a CPU
    (benchmarks/optimizer.py) and with no extension to build. With offload, DeepSpeed's CPU Adam,
    unless `torch_adam` says otherwise. "Adam" is made to mean Adam: DeepSpeed takes it for AdamW.
    """
    block = section.get("optimizer")
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        return [
            'deepspeed.optimizer: expected {"type": "AdamW", "params": {"lr": ...}}, got '
            f"{block!r}"
        ]
    params = block.setdefault("params", {})
    if not isinstance(params, dict):
        block["params"] = {}  # or DeepSpeed's parser reports it a second time
        return [f'deepspeed.optimizer.params: expected {{"lr": ...}}, got {params!r}']
    lr = params.get("lr")
    if not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 <= lr < math.inf:
        return [f"deepspeed.optimizer.params.lr: expected a number of at least 0, got {lr!r}"]
    if block["type"].lower() in ("adam", "adamw"):
        params.setdefault("adam_w_mode", block["type"].lower() == "adamw")
        params.setdefault("torch_adam", not offloads_optimizer(section))
        if params["torch_adam"]:
            params.setdefault("fused", not params.get("foreach"))
    return []


def _leftover_auto(node: Any, path: str) -> list[str]:
    if isinstance(node, dict):
        return [line for k, v in node.items() for line in _leftover_auto(v, f"{path}.{k}")]
    if node != "auto" or path in AUTO_IS_A_VALUE:
        return []
    if path.startswith("deepspeed.optimizer."):
        return [
            f'{path}: "auto" is filled in by the Hugging Face Trainer only; DeepSpeed would hand '
            "the word to the optimizer, which fails: give a value"
        ]
    return [
        f'{path}: "auto" is a convention of the Hugging Face Trainer; DeepSpeed would take its '
        "default without a word, or fail on the text: give a value, or leave the key out"
    ]
