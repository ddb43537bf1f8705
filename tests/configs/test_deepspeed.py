"""The DeepSpeed section: "auto" decided, batch sizes completed, nonsense refused with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from configs.deepspeed import BATCH_KEYS, Hardware, resolve
from configs.reading import ConfigError
from configs.schema import RunConfig
from model.gpt import build

CPU = Hardware(1, "cpu", bf16=False)


def resolved(raw: dict[str, Any], hardware: Hardware = CPU) -> dict[str, Any]:
    return resolve(RunConfig.model_validate(raw), hardware)


def problems(raw: dict[str, Any], hardware: Hardware = CPU) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolved(raw, hardware)
    return caught.value.problems


def batch(train: Any, micro: Any, accumulation: Any) -> dict[str, Any]:
    return {
        "deepspeed.train_batch_size": train,
        "deepspeed.train_micro_batch_size_per_gpu": micro,
        "deepspeed.gradient_accumulation_steps": accumulation,
    }


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        ((32, "auto", 2), 4, (32, 4, 2)),
        ((32, 4, "auto"), 4, (32, 4, 2)),
        (("auto", 4, 2), 4, (32, 4, 2)),
        ((32, "auto", "auto"), 4, (32, 8, 1)),
        (("auto", 4, "auto"), 4, (16, 4, 1)),
        ((32, 4, 2), 4, (32, 4, 2)),
    ],
)
def test_two_batch_sizes_give_the_third(
    altered: Callable[..., Any], given: Any, world_size: int, expected: Any
) -> None:
    section = resolved(altered(batch(*given)), Hardware(world_size, "cpu", bf16=False))
    assert tuple(section[key] for key in BATCH_KEYS) == expected


def test_a_batch_that_does_not_multiply_states_the_numbers_and_the_fix(
    altered: Callable[..., Any],
) -> None:
    (line,) = problems(altered(batch(16, 4, 2)))
    for part in (
        "train_batch_size=16",
        "train_micro_batch_size_per_gpu=4",
        "gradient_accumulation_steps=2",
        "ranks=1",
        "set gradient_accumulation_steps to 4",
        "without a launcher",
    ):
        assert part in line
    (line,) = problems(altered(batch(10, 4, "auto")), Hardware(3, "cpu", bf16=False))
    assert "set train_batch_size to a multiple of 12, such as 12" in line
    assert "launcher" not in line
    (line,) = problems(altered(batch("auto", "auto", 2)))
    assert "give train_batch_size or train_micro_batch_size_per_gpu" in line
    assert "positive integer" in problems(altered(batch(0, 1, 1)))[0]
    assert "positive integer" in problems(altered(batch(5.5, 1, 1)))[0]


@pytest.mark.parametrize(
    ("hardware", "bf16", "fp16"),
    [
        (CPU, False, False),
        (Hardware(1, "cuda", bf16=True), True, False),
        (Hardware(1, "cuda", bf16=False), False, True),
    ],
)
@pytest.mark.parametrize("block", ["bf16", "fp16"])
def test_auto_precision(
    altered: Callable[..., Any], hardware: Hardware, bf16: bool, fp16: bool, block: str
) -> None:
    section = resolved(altered({f"deepspeed.{block}": {"enabled": "auto"}}), hardware)
    assert section["bf16"]["enabled"] is bf16
    assert section["fp16"]["enabled"] is fp16


def test_precision_mistakes(altered: Callable[..., Any]) -> None:
    on = {"enabled": True}
    (line,) = problems(altered({"deepspeed.fp16": on}))
    assert line.startswith("deepspeed.fp16.enabled: this trainer has no float16 on a CPU")
    gpu = Hardware(1, "cuda", bf16=True)
    (line,) = problems(altered({"deepspeed.fp16": on, "deepspeed.bf16": on}), gpu)
    assert "both enabled" in line
    (line,) = problems(altered({"deepspeed.bf16": {"enabled": "yes"}}))
    assert "deepspeed.bf16.enabled" in line
    (line,) = problems(altered({"deepspeed.bf16": True}))
    assert "expected an object" in line


def test_expandable_segments_need_cudas_allocator(altered: Callable[..., Any]) -> None:
    raw = altered({"training.expandable_segments": True})
    (line,) = problems(raw)
    assert line.startswith("training.expandable_segments: ")
    assert "no caching allocator" in line
    resolved(raw, Hardware(1, "cuda", bf16=True))


def test_zero_block_is_checked_by_deepspeeds_own_schema(altered: Callable[..., Any]) -> None:
    zero = {"stage": 2, "overlap_com": True, "reduce_bucket_size": "big"}
    lines = problems(altered({"deepspeed.zero_optimization": zero}))
    assert any("overlap_com: unknown key; did you mean 'overlap_comm'?" in line for line in lines)
    assert any("deepspeed.zero_optimization.reduce_bucket_size" in line for line in lines)
    assert "stage" in problems(altered({"deepspeed.zero_optimization": {"stage": 4}}))[0]


@pytest.mark.parametrize(("stage", "given"), [(1, None), (2, "auto"), (3, None)])
def test_the_reduction_bucket_is_no_larger_than_all_gradients(
    altered: Callable[..., Any], stage: int, given: Any
) -> None:
    zero = {"stage": stage} | ({"reduce_bucket_size": given} if given else {})
    raw = altered({"deepspeed.zero_optimization": zero})
    model = RunConfig.model_validate(raw).model
    bucket = resolved(raw)["zero_optimization"]["reduce_bucket_size"]
    assert bucket == sum(parameter.numel() for parameter in build(model, seed=0).parameters())


def test_a_given_reduction_bucket_is_kept_and_a_large_model_has_deepspeeds(
    altered: Callable[..., Any],
) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 1000}
    section = resolved(altered({"deepspeed.zero_optimization": zero}))
    assert section["zero_optimization"]["reduce_bucket_size"] == 1000
    large = {"model.layers": 12, "model.width": 2048, "model.heads": 16}  # over 600 million
    section = resolved(altered(large | {"deepspeed.zero_optimization": {"stage": 2}}))
    assert section["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert "reduce_bucket_size" not in resolved(altered({}))["zero_optimization"]


def test_a_meaningless_auto_and_a_quoted_number_are_refused(altered: Callable[..., Any]) -> None:
    lines = problems(
        altered(
            {
                "deepspeed.gradient_clipping": "auto",
                "deepspeed.optimizer.params.weight_decay": "1e-2",
            }
        )
    )
    assert any(line.startswith("deepspeed.gradient_clipping:") for line in lines)
    assert any('weight_decay: "1e-2" is text' in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "offload", "expected"),
    [
        ("AdamW", False, {"adam_w_mode": True, "torch_adam": True, "fused": True}),
        ("Adam", False, {"adam_w_mode": False, "torch_adam": True, "fused": True}),
        ("AdamW", True, {"adam_w_mode": True, "torch_adam": False}),
        ("Adam", True, {"adam_w_mode": False, "torch_adam": False}),
    ],
)
def test_the_optimizer_is_named(
    altered: Callable[..., Any], kind: str, offload: bool, expected: dict[str, bool]
) -> None:
    zero = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    raw = altered({"deepspeed.optimizer.type": kind, "deepspeed.zero_optimization": zero})
    params = resolved(raw)["optimizer"]["params"]
    chosen = {key: params[key] for key in ("adam_w_mode", "torch_adam", "fused") if key in params}
    assert chosen == expected


@pytest.mark.parametrize("limit", [None, "auto", -1, True, float("inf"), [1.0]])
def test_a_clipping_norm_is_a_number(altered: Callable[..., Any], limit: Any) -> None:
    lines = problems(altered({"deepspeed.gradient_clipping": limit}))
    assert any(line.startswith("deepspeed.gradient_clipping: expected a norm") for line in lines)


@pytest.mark.parametrize("lr", [None, "auto", -1, True, float("nan")])
def test_a_learning_rate_is_needed(altered: Callable[..., Any], lr: Any) -> None:
    lines = problems(altered({"deepspeed.optimizer.params.lr": lr}))
    assert any(
        line.startswith("deepspeed.optimizer.params.lr: expected a number") for line in lines
    )
