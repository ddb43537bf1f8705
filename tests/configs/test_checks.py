"""The checker's rules: each with a setting it refuses and one that it lets pass.

tests/end_to_end/test_checker.py compares what the rules say of DeepSpeed with DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from configs import checks
from configs.deepspeed import Hardware, resolve, warnings_of
from configs.known_keys import is_section, keys_read, nearest
from configs.reading import ConfigError, explain
from configs.schema import ActivationCheckpointing, RunConfig

CPU = Hardware(1, "cpu", bf16=False)
ZERO = "zero_optimization"
CPU_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def problems(raw: dict[str, Any], hardware: Hardware = CPU) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(RunConfig.model_validate(raw), hardware)
    return caught.value.problems


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": {"lr": 0.01, **params}}


# (the deepspeed section's change, the refused key, a part of the message)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # unknown keys, in sections of every form
    ({"gradient_cliping": 1.0}, "gradient_cliping", "did you mean 'gradient_clipping'?"),
    ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "'zero_optimization'"),
    ({"tensorboard": {"enable": True}}, "tensorboard.enable", "'enabled'"),
    ({"bf16": {"enable": True}}, "bf16.enable", "'enabled'"),
    ({"comms_logger": {"enabld": True}}, "comms_logger.enabld", "'enabled'"),
    ({"flops_profiler": {"profil_step": 3}}, "flops_profiler.profil_step", "'profile_step'"),
    ({"timers": {"troughput": {}}}, "timers.troughput", "'throughput'"),
    ({"timers": {"throughput": {"enable": 1}}}, "timers.throughput.enable", "'enabled'"),
    ({"checkpoint": {"load_univers": True}}, "checkpoint.load_univers", "'load_universal'"),
    ({"checkpoint": {"writer": {"typ": "x"}}}, "checkpoint.writer.typ", "'type'"),
    ({"data_types": {"grad_accum": "fp32"}}, "data_types.grad_accum", "'grad_accum_dtype'"),
    ({"tensor_parallel": {"autotp": 2}}, "tensor_parallel.autotp", "'autotp_size'"),
    ({"tensor_parallel": {"tp": {"size": 2}}}, "tensor_parallel.tp.size", "'tp_size'"),
    ({"scheduler": {"type": "WarmupLR", "param": {}}}, "scheduler.param", "'params'"),
    ({"optimizer": optimizer("AdamW") | {"param": {}}}, "optimizer.param", "'params'"),
    ({ZERO: {"stage": 3, "offload_param": {"devic": "cpu"}}},
     f"{ZERO}.offload_param.devic", "'device'"),
    ({"activation_checkpointing": {"cpu_checkpoint": True}},
     "activation_checkpointing.cpu_checkpoint", "'cpu_checkpointing'"),
    ({"bf16": {"enabled": True, "check_grad_overflow": False}},
     "bf16.check_grad_overflow", "non-finite gradients"),
    # values
    ({"wall_clock_breakdown": "false"}, "wall_clock_breakdown", "expected true or false"),
    ({"flops_profiler": {"enabled": 1}}, "flops_profiler.enabled", "expected true or false"),
    ({"communication_data_type": "half"}, "communication_data_type", "Invalid"),
    ({"checkpoint": {"writer": {"type": "python"}}}, "checkpoint.writer", "save_in_background"),
    ({"checkpoint": {"use_node_local_storage": True}},
     "checkpoint.use_node_local_storage", "shared file system"),
    ({"checkpoint": {"checkpoint_serialization": False}},
     "checkpoint.checkpoint_serialization", "zip format"),
    ({"checkpoint": {"tag_validation": "never"}}, "checkpoint", "invalid tag_validation"),
    ({ZERO: {"stage": 2, "mics_shard_size": 2}}, ZERO, "removed"),
    ({"steps_per_print": "auto"}, "steps_per_print", "Hugging Face"),
    ({ZERO: {"stage": 2, "overlap_comm": "auto"}}, f"{ZERO}.overlap_comm", "Hugging Face"),
    *(({"optimizer": optimizer("AdamW", **{key: "auto"})}, f"optimizer.params.{key}", "Trainer")
      for key in ("betas", "eps", "weight_decay")),
    # ZeRO
    ({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}, f"{ZERO}.offload_param", "stage 3"),
    ({ZERO: {"stage": 1, "stage3_max_live_parameters": 10**9}},
     f"{ZERO}.stage3_max_live_parameters", "stage 3 only"),
    ({ZERO: {"stage": 2, "max_reuse_distance": 5}}, f"{ZERO}.max_reuse_distance", "stage 3 only"),
    ({ZERO: {"stage": 2, "sub_group_size": 5}}, f"{ZERO}.sub_group_size", "stage 3 only"),
    ({ZERO: {"stage": 3, "round_robin_gradients": True}},
     f"{ZERO}.round_robin_gradients", "ignores it at stage 3"),
    ({ZERO: {"stage": 0, **CPU_OFFLOAD}}, f"{ZERO}.offload_optimizer", "off at stage 0"),
    ({ZERO: {"stage": 1, "cpu_offload": True}}, f"{ZERO}.cpu_offload", "write offload_optimizer"),
    ({ZERO: {"stage": 2, "allgather_partitions": False}},
     f"{ZERO}.allgather_partitions", "never reads it"),
    ({ZERO: {"stage": 1, "legacy_stage1": True}}, f"{ZERO}.legacy_stage1", "raises"),
    ({ZERO: {"stage": 1, "compute_grad_norm": False}}, f"{ZERO}.compute_grad_norm", "clipping"),
    ({ZERO: {"stage": 2}, "prescale_gradients": True}, "prescale_gradients", "asserts at stage 2"),
    ({ZERO: {"stage": 2}, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor", "assert"),
    ({ZERO: {"stage": 2, "offload_optimizer": {"device": "nvme", "pin_memory": True}}},
     f"{ZERO}.offload_optimizer.device", "takes nvme for cpu"),
    ({ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "fast_init": True}}},
     f"{ZERO}.offload_optimizer.fast_init", "below stage 3"),
    ({ZERO: {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
     f"{ZERO}.offload_optimizer.device", "takes nvme for cpu"),
    ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}},
     f"{ZERO}.offload_param.nvme_path", "missing"),
    ({"aio": {"block_size": 4096}}, "aio", "nvme only"),
    # precision
    ({"bfloat16": {"enabled": True}}, "bfloat16", 'write "bf16"'),
    ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", "asserts"),
    ({"data_types": {"grad_accum_dtype": "fp33"}}, "data_types.grad_accum_dtype", "'fp32'"),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
     "data_types.grad_accum_dtype", "stage to 1"),
    # the optimizer
    ({"optimizer": optimizer("AdamW", max_grad_norm=1.0)}, "optimizer.params.max_grad_norm",
     "set deepspeed.gradient_clipping"),
    ({"optimizer": optimizer("AdamW", beta=[0.9, 0.95])}, "optimizer.params.beta", "'betas'"),
    ({"optimizer": optimizer("AdamW", maximize=True), ZERO: {"stage": 2, **CPU_OFFLOAD}},
     "optimizer.params.maximize", "DeepSpeedCPUAdam does not take it"),
    ({"optimizer": optimizer("AdamW", amsgrad=True), ZERO: {"stage": 2, **CPU_OFFLOAD}},
     "optimizer.params.amsgrad", "torch_adam"),
    ({"optimizer": optimizer("AdamW", fp32_optimizer_states=False)},
     "optimizer.params.fp32_optimizer_states", "does not take it"),
    ({"optimizer": optimizer("AdamW", adam_w_mode=False)}, "optimizer.params.adam_w_mode", "Adam"),
    ({"optimizer": optimizer("SGD", torch_adam=True)}, "optimizer.params.torch_adam", "not take"),
    ({"optimizer": optimizer("sgd")}, "optimizer.type", "did you mean 'SGD'?"),
    ({"optimizer": optimizer("MuAdam")}, "optimizer.type", "mup"),
    ({"optimizer": optimizer("LBFGS")}, "optimizer.type", "closure"),
    ({"optimizer": optimizer("SGD"), ZERO: {"stage": 1}}, "optimizer.type", "untested"),
    ({"optimizer": optimizer("Muon", beta=1)}, "optimizer.params.beta", "'betas'"),
    # what this trainer does not drive, and what DeepSpeed no longer has
    *(({key: {"enabled": True}}, key, "no effect in this trainer")
      for key in ("autotuning", "data_efficiency", "hybrid_engine")),
    ({"pipeline": {"stages": 2}}, "pipeline", "pipeline engine"),
    ({"compile": {"deepcompile": True}}, "compile", "engine.compile()"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size", "divide"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last", "data loader"),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation", "micro-batch"),
    *(({key: {}}, key, "removed") for key in
      ("amp", "elasticity", "sparse_attention", "eigenvalue", "compression_training",
       "progressive_layer_drop", "quantize_training", "curriculum_learning")),
    # contradictions found by DeepSpeed's parser, in its words
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "deepspeed", "Stage 1, 2"),
]  # fmt: skip

ACCEPTED: list[dict[str, Any]] = [
    {"gradient_clipping": 0.1, "wall_clock_breakdown": False, "steps_per_print": 10},
    {"tensorboard": {"enabled": True, "output_path": "x"}, "flops_profiler": {"enabled": True}},
    {"comms_logger": {"enabled": True}, "timers": {"throughput": {"enabled": False}}},
    {"checkpoint": {"load_universal": True, "tag_validation": "Warn"}},
    {"communication_data_type": "fp32", "data_types": {"keep_in_fp32_modules": "auto"}},
    {"data_types": {"param_dtype": "fp32", "grad_accum_dtype": "float32"}},
    {"autotuning": {"enabled": False}, "pipeline": {}, "dataloader_drop_last": False},
    {"managed_gradient_accumulation": True, "prescale_gradients": True},
    {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, ZERO: {"stage": 1}},
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, ZERO: {"stage": 1}},
    # DeepSpeed's own defaults written out, as guides do
    {ZERO: {"stage": 2, "allgather_partitions": True, "contiguous_gradients": True,
            "reduce_scatter": True, "overlap_comm": True, "round_robin_gradients": True,
            **CPU_OFFLOAD}},
    {ZERO: {"stage": 2, "reduce_scatter": False}, "prescale_gradients": True},
    {ZERO: {"stage": 1, "compute_grad_norm": False}, "gradient_clipping": 0},
    {ZERO: {"stage": 3, "stage3_max_live_parameters": 10**9, "sub_group_size": 10**9,
            "offload_param": {"device": "cpu"}, **CPU_OFFLOAD}},
    {ZERO: {"stage": 3, "allgather_bucket_size": 500_000_000},
     "zero_allow_untested_optimizer": True},
    {ZERO: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}},
     "aio": {"block_size": 4096}},
    {ZERO: {"stage": 3, "offload_optimizer":
            {"device": "nvme", "nvme_path": "/x", "fast_init": True, "pipeline_read": True}}},
    {"optimizer": optimizer("Adam", adam_w_mode=True, amsgrad=True)},
    {"optimizer": optimizer("AdamW", foreach=True)},
    {"optimizer": optimizer("AdamW", fp32_optimizer_states=False, bias_correction=True),
     ZERO: {"stage": 2, **CPU_OFFLOAD}},
    {"optimizer": optimizer("Lion"), ZERO: {"stage": 1}},
    {"optimizer": optimizer("Muon", momentum=0.9, muon_lr=0.02), ZERO: {"stage": 1}},
    {"optimizer": optimizer("SGD", momentum=0.9)},
    {"optimizer": optimizer("SGD"), ZERO: {"stage": 1}, "zero_allow_untested_optimizer": True},
]  # fmt: skip


@pytest.mark.parametrize(("change", "key", "part"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(altered: Callable[..., Any], change: dict[str, Any], key: str, part: str) -> None:
    raw = altered({f"deepspeed.{name}": value for name, value in change.items()})
    name = key if key == "deepspeed" else f"deepspeed.{key}"
    lines = [line for line in problems(raw) if line.startswith(f"{name}: ")]
    assert len(lines) == 1, problems(raw)
    assert part in lines[0]


@pytest.mark.parametrize("change", ACCEPTED, ids=lambda value: str(value)[:60])
def test_accepted(altered: Callable[..., Any], change: dict[str, Any]) -> None:
    raw = altered({f"deepspeed.{name}": value for name, value in change.items()})
    resolve(RunConfig.model_validate(raw), CPU)


SECTIONS = (
    "activation_checkpointing", "aio", "bf16", "checkpoint", "comet", "comms_logger", "csv_monitor",
    "data_types", "flops_profiler", "fp16", "optimizer", "scheduler", "tensor_parallel",
    "tensorboard", "timers", "torch_autocast", "wandb", "zero_optimization",
)  # fmt: skip


@pytest.mark.parametrize("value", [[], [1], 1, "yes", True, None], ids=str)
@pytest.mark.parametrize(
    "key", [*SECTIONS, *checks.NOT_DRIVEN, "optimizer.params", "scheduler.params"]
)
def test_a_section_of_the_wrong_type_is_one_line(
    altered: Callable[..., Any], key: str, value: Any
) -> None:
    expected = "has no effect" if key in checks.NOT_DRIVEN else "expected"
    (line,) = problems(altered({f"deepspeed.{key}": value}))
    assert line.startswith(f"deepspeed.{key}: {expected}"), line
    assert "attribute" not in line


def test_the_sections_above_are_all_that_deepspeed_has() -> None:
    found = {key for key in keys_read((), {}) if is_section(key)}
    assert found - checks.NOT_DRIVEN.keys() == set(SECTIONS)


def test_every_section_that_refuses_unknown_keys_names_the_known() -> None:
    """Also inside sections that DeepSpeed knows by an alias."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    inner = 0
    for model in DeepSpeedConfigModel.__subclasses__():
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                for given in {name, field.alias or name}:
                    with pytest.raises(ValidationError) as caught:
                        model.model_validate({given: {"no such key": 1}})
                    lines = explain(caught.value, model)
                    assert any(f"{given}.no such key: unknown key; known: " in x for x in lines)
                    inner += 1
    assert inner > 5


def test_all_problems_at_once(altered: Callable[..., Any]) -> None:
    mixed = {"stage": 2, "overlap_com": True, "mics_shard_size": 2, "sub_group_size": 1}
    raw = altered({"deepspeed.zero_optimization": mixed, "deepspeed.tensorbord": {}})
    raw["deepspeed"]["tensorboard"] = {"enabld": True, "outputpath": ""}
    assert len(problems(raw)) == 6


CHECKPOINTING = "deepspeed.activation_checkpointing"
ALL = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "cpu_checkpointing": True,
}


@pytest.mark.parametrize(
    ("block", "backend", "ranks", "device", "expected"),
    [
        ({}, "torch", 1, "cpu", []),
        (ALL, "torch", 1, "cpu", ["", ".partition", ".contiguous", ".cpu_checkpointing"]),
        (ALL, "torch", 1, "cuda", ["", ".partition", ".contiguous"]),
        (ALL, "deepspeed", 2, "cpu", []),
        ({"cpu_checkpointing": True}, "deepspeed", 1, "cuda", []),
        ({"cpu_checkpointing": True}, "deepspeed", 1, "cpu", [".cpu_checkpointing"]),
        ({"contiguous_memory_optimization": True}, "deepspeed", 2, "cuda", [".contiguous"]),
        ({"number_checkpoints": 4, "profile": True}, "deepspeed", 1, "cpu", []),
    ],
)
def test_activation_checkpointing(
    block: dict[str, Any], backend: Any, ranks: int, device: str, expected: list[str]
) -> None:
    ours = ActivationCheckpointing(backend=backend, policies={"full": "all"})
    config: Any = SimpleNamespace(activation_checkpointing=ours)
    section = {"activation_checkpointing": block, "tensor_parallel": {"autotp_size": ranks}}
    lines = checks.problems_of(config, section, device)
    assert len(lines) == len(expected), lines
    for line, key in zip(lines, expected, strict=True):
        assert line.startswith(CHECKPOINTING + key)


@pytest.mark.parametrize(
    ("change", "ranks", "expected"),
    [
        ({}, 1, []),
        ({ZERO: {"stage": 2}}, 1, ["stage=2: partitions nothing on one data-parallel"]),
        ({ZERO: {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}, 2, ["stage=2: partitions"]),
        ({ZERO: {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}, 4, []),
        ({ZERO: {"stage": 2}}, 2, []),
        ({ZERO: {"stage": 2, **CPU_OFFLOAD}}, 1, []),
        ({ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}}, 1, []),
        ({ZERO: {"stage": 2, "overlap_comm": True, **CPU_OFFLOAD}}, 1, ["overlap_comm"]),
        ({ZERO: {"stage": 2, "overlap_comm": True}}, 2, []),
        ({"wandb": {"enabled": True}, "csv_monitor": {"enabled": False}}, 1, ["wandb: "]),
        ({"zero_force_ds_cpu_optimizer": False}, 1, ["zero_force_ds_cpu_optimizer: no effect"]),
        ({"gradient_accumulation_steps": 16, "train_batch_size": 32}, 2, []),
        (
            {
                "gradient_accumulation_steps": 16,
                "train_batch_size": 32,
                "bf16": {"enabled": True},
            },
            2,
            ["set zero_optimization.stage to 1 and data_types.grad_accum_dtype"],
        ),
        (
            {
                "gradient_accumulation_steps": 16,
                "train_batch_size": 32,
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                ZERO: {"stage": 1},
            },
            2,
            [],
        ),
        ({"bf16": {"enabled": True}}, 2, []),
    ],
)
def test_warnings(
    altered: Callable[..., Any], change: dict[str, Any], ranks: int, expected: list[str]
) -> None:
    raw = altered({f"deepspeed.{name}": value for name, value in change.items()})
    config, hardware = RunConfig.model_validate(raw), Hardware(ranks, "cpu", bf16=False)
    lines = warnings_of(config, resolve(config, hardware), hardware)
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line


@pytest.mark.parametrize(("policies", "count"), [({}, 1), ({"none": "all"}, 1), ({"full": 2}, 0)])
def test_a_warning_for_checkpointing_options_without_a_block(
    policies: dict[str, Any], count: int
) -> None:
    config: Any = SimpleNamespace(activation_checkpointing=SimpleNamespace(policies=policies))
    section = {"activation_checkpointing": {"profile": True}, "gradient_accumulation_steps": 1}
    assert len(checks.warnings_of(config, section, 2)) == count


def test_keys_are_those_of_deepspeeds_documentation() -> None:
    """Sections of deepspeed.ai/docs/config-json, and the dictionaries DeepSpeed declares itself."""
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    documented = {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "optimizer", "scheduler", "communication_data_type", "prescale_gradients",
        "gradient_predivide_factor", "fp16", "bf16", "gradient_clipping", "zero_optimization",
        "zero_allow_untested_optimizer", "aio", "steps_per_print", "wall_clock_breakdown",
        "dump_state", "autotuning", "flops_profiler", "activation_checkpointing",
        "data_efficiency", "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger",
        "checkpoint", "data_types",
    }  # fmt: skip
    assert documented <= keys_read((), {}).keys()
    assert keys_read(("activation_checkpointing",), {}) == ACT_CHKPT_DEFAULT
    assert keys_read(("aio",), {}) == AIO_DEFAULT_DICT
    assert "gradient_cliping" not in keys_read((), {})


def test_nearest_names_ignore_case_or_list_the_known() -> None:
    assert nearest("ADAMW", ["AdamW", "SGD"]) == "did you mean 'AdamW'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


def test_deepspeeds_checkpoints_at_zero_3_need_dropout(altered: Callable[..., Any]) -> None:
    def run(**settings: Any) -> dict[str, Any]:
        checkpointing = {"backend": "deepspeed", "policies": {"full": "all"}} | settings
        return {ZERO_KEY: {"stage": 3}, "activation_checkpointing": checkpointing}

    raw = altered({**run(), "model.dropout": 0.0})
    (line,) = [text for text in problems(raw) if "backend" in text]
    assert '"reentrant": true' in line
    for fine in (
        {**run(), "model.dropout": 0.1},
        {**run(reentrant=True), "model.dropout": 0.0},
        {**run(policies={}), "model.dropout": 0.0},
        {**run(), "model.dropout": 0.0, ZERO_KEY: {"stage": 2}},
    ):
        resolve(RunConfig.model_validate(altered(fine)), CPU)


ZERO_KEY = "deepspeed.zero_optimization"
