"""What the installed DeepSpeed does with the settings that configs/checks.py speaks of.

Argument: the file for the observations. Each function below tries one setting on a model of eight
numbers, without any code of this project between it and DeepSpeed; an exception is an observation.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.config import DeepSpeedConfig

from training.engine import read_ranks, start_process_group

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": True}
OBSERVATIONS: dict[str, Callable[[], Any]] = {}


def observe(function: Callable[[], Any]) -> Callable[[], Any]:
    OBSERVATIONS[function.__name__] = function
    return function


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.weight * gradient).sum()


@contextlib.contextmanager
def engine(**settings: Any) -> Iterator[Any]:
    model = Model()
    built, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=BASE | settings,
        dist_init_required=False,
    )
    try:
        yield built
    finally:
        built.destroy()


def micro_batch(built: Any, gradient: float = 1.0) -> None:
    built.backward(built(gradient))
    built.step()


def failure(**settings: Any) -> str:
    """The exception of building and running an engine; empty if there is none."""
    try:
        with engine(**settings) as built:
            micro_batch(built)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def params(kind: str = "AdamW", **given: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 0.1, "torch_adam": True} | given}}


def zero(stage: int, **given: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **given}}


@observe
def misspelt_keys() -> Any:
    block = {"partition_activation": True}
    with engine(gradient_cliping=0.1, activation_checkpointing=block) as built:
        return built.gradient_clipping()


@observe
def text_for_a_boolean() -> Any:
    with engine(prescale_gradients="false") as built:
        return built.postscale_gradients()


@observe
def activation_checkpointing_is_only_stored() -> Any:
    with engine(activation_checkpointing={"partition_activations": True}):
        return [checkpointing.is_configured(), checkpointing.PARTITION_ACTIVATIONS]


@observe
def auto_precision() -> Any:
    with engine(fp16={"enabled": "auto"}) as built:
        return [built.fp16_enabled(), str(built.module.weight.dtype)]


@observe
def fp16_on_a_cpu() -> Any:
    supported = deepspeed.accelerator.get_accelerator().is_fp16_supported()
    return [bool(supported), failure(fp16={"enabled": True})]


@observe
def old_name_of_bf16() -> Any:
    with engine(bfloat16={"enabled": True}) as built:
        return built.bfloat16_enabled()


@observe
def offloaded_parameters() -> Any:
    """Where ZeRO keeps a parameter between uses, by stage."""
    found = {}
    for stage in (2, 3):
        with engine(**zero(stage, offload_param={"device": "cpu"})) as built:
            shard = getattr(built.module.weight, "ds_tensor", None)
            found[stage] = None if shard is None else str(shard.final_location)
    return found


@observe
def nvme_below_stage_3() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        offload = {"device": "nvme", "nvme_path": folder}
        error = failure(**zero(2, offload_optimizer=offload))
        return [error, len(list(Path(folder).rglob("*")))]


@observe
def stage_3_keys_at_stage_2() -> Any:
    return failure(**zero(2, stage3_max_live_parameters=1, sub_group_size=1, leaf_module={}))


@observe
def kind_of_adam() -> Any:
    found = {}
    for name, settings in {
        "Adam": params("Adam"),
        "Adam, adam_w_mode false": params("Adam", adam_w_mode=False),
        "AdamW, adam_w_mode false": params("AdamW", adam_w_mode=False),
    }.items():
        with engine(**settings) as built:
            found[name] = type(built.optimizer).__name__
    return found


@observe
def optimizer_params() -> Any:
    offload = zero(2, offload_optimizer={"device": "cpu"})
    return {
        "max_grad_norm": failure(**params(max_grad_norm=1.0)),
        "unknown": failure(**params(beta=0.9)),
        "auto": failure(**params(betas="auto")),
        "unknown to CPU Adam": failure(**params(torch_adam=False, capturable=False), **offload),
        "LBFGS": failure(optimizer={"type": "LBFGS", "params": {"lr": 0.1}}),
        "sgd": failure(optimizer={"type": "sgd", "params": {"lr": 0.1}}),
        "muadam": failure(optimizer={"type": "muadam", "params": {"lr": 0.1}}),
    }


@observe
def untested_optimizer() -> Any:
    offload = zero(2, offload_optimizer={"device": "cpu"})
    return {
        "not allowed": failure(**SGD | {"zero_allow_untested_optimizer": False}, **zero(1)),
        "allowed": failure(**SGD, **zero(1)),
        "offload": failure(**SGD, **offload, zero_force_ds_cpu_optimizer=True),
    }


@observe
def contradictions() -> Any:
    fp32 = {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}}
    return {
        "stage 0 fp32": failure(**fp32, **zero(0)),
        "param_dtype": failure(data_types={"param_dtype": "bf16"}),
        "prescale": failure(prescale_gradients=True, **zero(2)),
        "predivide": failure(gradient_predivide_factor=2.0, **zero(2)),
        "no norm": failure(**zero(2, compute_grad_norm=False)),
        "legacy": failure(**zero(1, legacy_stage1=True)),
        "amp": failure(amp={"enabled": False}),
    }


@observe
def pipeline_section() -> Any:
    with engine(pipeline={"stages": 4}, dataloader_drop_last=True) as built:
        return type(built).__name__


@observe
def sequence_parallel_ranks() -> Any:
    config = {"train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": 2}
    return DeepSpeedConfig(config).train_batch_size


@observe
def unmanaged_accumulation() -> Any:
    """Updates in two micro-batches of an accumulation of two."""
    found = []
    for managed in (True, False):
        settings = {"gradient_accumulation_steps": 2, "managed_gradient_accumulation": managed}
        with engine(**settings) as built:
            micro_batch(built)
            micro_batch(built)
            found.append(built.global_steps)
    return found


@observe
def monitor_axis() -> Any:
    """The x values of two steps of two samples."""
    with tempfile.TemporaryDirectory() as folder:
        monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
        with engine(csv_monitor=monitor) as built:
            micro_batch(built)
            micro_batch(built)
        (path,) = Path(folder).rglob("*_lr.csv")
        return [line.split(",")[0] for line in path.read_text().splitlines()[1:]]


@observe
def sum_of_gradients() -> Any:
    """Sixteen micro-batches in bf16: a gradient of 1, then fifteen of 2^-9 that bf16 loses."""
    found = {}
    for stage in (0, 1, 2, 3):
        for offload in (False, True) if stage else (False,):
            for dtype in (None, "fp32") if stage else (None,):
                block = zero(stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {}))
                settings = SGD | block | {
                    "gradient_accumulation_steps": 16,
                    "gradient_clipping": 0.0,
                    "bf16": {"enabled": True},
                    "data_types": {"grad_accum_dtype": dtype},
                }  # fmt: skip
                with engine(**settings) as built:
                    for gradient in (1.0, *[2.0**-9] * 15):
                        micro_batch(built, gradient)
                    with deepspeed.zero.GatheredParameters(list(built.module.parameters())):
                        total = -16 * built.module.weight[0].item()
                name = f"stage {stage}{' offload' if offload else ''} {dtype}"
                found[name] = "lost" if abs(total - 1) < 1e-3 else "kept"
    return found


def checkpointed_backward(**block: Any) -> str:
    """The exception of one block run by deepspeed.checkpointing, or the gradient."""
    config = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": block}
    try:
        checkpointing.configure(None, deepspeed_config=config)
        layer = torch.nn.Linear(4, 4)
        inputs = torch.ones(2, 4, requires_grad=True) * 1  # no leaf, as a block's input is none
        checkpointing.checkpoint(lambda x: layer(x).relu(), inputs).sum().backward()
        return "gradient" if layer.weight.grad is not None else "none"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@observe
def activation_checkpointing() -> Any:
    found = {
        "cpu": checkpointed_backward(cpu_checkpointing=True),
        "contiguous": checkpointed_backward(contiguous_memory_optimization=True),
        "cpu, partition": checkpointed_backward(cpu_checkpointing=True, partition_activations=True),
    }
    # What a rank keeps of a partitioned activation of 64 numbers, alone.
    found["kept of 64"] = checkpointing.get_partition_size(torch.zeros(64))
    return found


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return f"unexpected {type(error).__name__}: {error}"


if __name__ == "__main__":
    start_process_group(read_ranks())
    observed = {name: attempt(function) for name, function in OBSERVATIONS.items()}
    Path(sys.argv[1]).write_text(json.dumps(observed, indent=1))
    torch.distributed.destroy_process_group()
