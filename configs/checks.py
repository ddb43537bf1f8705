"""Settings that DeepSpeed ignores, misreads or crashes on, refused with what it would do.

Each statement about DeepSpeed here was read in its source, and tests/end_to_end/test_checker.py
compares those that users meet with what the installed DeepSpeed does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from configs.known_keys import nearest, section_problems, whole_problems
from configs.schema import RunConfig

ZERO = "deepspeed.zero_optimization"
CHECKPOINTING = "deepspeed.activation_checkpointing"
OFFLOADS = ("offload_optimizer", "offload_param")
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")

# Sections that DeepSpeed accepts and that do nothing here, or harm: what happens, what to do.
NOT_DRIVEN = {
    "autotuning": "driven by DeepSpeed's launcher, which starts its own trials; leave it out",
    "bfloat16": 'DeepSpeed\'s old name of bf16, read only while bf16 is absent; write "bf16"',
    "compile": "applies after engine.compile(), which this trainer does not call; leave it out",
    "data_efficiency": "acts on DeepSpeed's data loader and layers, not used here; leave it out",
    "data_parallel_size": "the number of ranks is the launcher's; leave it out",
    "dataloader_drop_last": "acts on DeepSpeed's own data loader, not used here; leave it out",
    "datastates_ckpt": "an asynchronous checkpoint writer that this trainer cannot verify",
    "disable_allgather": "DeepSpeed stores it and never reads it; leave it out",
    "expert_parallel": "replaces mixture-of-experts blocks, and this model has none; leave it out",
    "hybrid_engine": "alternates training with generation for reinforcement learning; leave it out",
    "pipeline": "read by DeepSpeed's pipeline engine only, not used here; leave it out",
    "sequence_parallel_size": "this trainer has no sequence parallelism, and DeepSpeed would "
    "divide the number of ranks by it; leave it out",
    "use_data_before_expert_parallelism": "orders the groups of experts, and this model has none",
    "vocabulary_size": "DeepSpeed only warns by it; set model.vocabulary_multiple instead",
    "weight_quantization": "for inference; leave it out",
}  # fmt: skip

# Passed to the stage 3 optimizer or to zero.Init, and to nothing else.
STAGE_3_KEYS = {
    "enable_sanity_checks", "leaf_module", "log_trace_cache_warnings", "memory_efficient_linear",
    "offload_param", "override_module_apply", "sub_group_size", "zero_hpz_partition_size",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights",
}  # fmt: skip
# Passed to the optimizer of stages 1 and 2, and not to that of stage 3.
STAGE_1_2_KEYS = {
    "allgather_bucket_size", "elastic_checkpoint", "ignore_unused_parameters",
    "parameter_alignment", "round_robin_gradients", "use_multi_rank_bucket_allreduce",
}  # fmt: skip


def problems_of(config: RunConfig, section: Mapping[str, Any], device: str) -> list[str]:
    """Every setting of a resolved section that DeepSpeed ignores, misreads or crashes on."""
    idle = [key for key in NOT_DRIVEN if key in section and not _is_off(section[key])]
    driven = {key: value for key, value in section.items() if key not in idle}
    lines = [f"deepspeed.{key}: has no effect in this trainer: {NOT_DRIVEN[key]}" for key in idle]
    lines += section_problems(driven)
    lines += _zero(_block(section, "zero_optimization"), section)
    lines += _checkpointing(config, section, device)
    lines += _backend(config, section)
    lines += _optimizer(section)
    lines += _data_types(section)
    lines += _saving(_block(section, "checkpoint"))
    lines += _other(section)
    return lines if lines else whole_problems(driven)


def _saving(block: Mapping[str, Any]) -> Iterator[str]:
    """What of the checkpoint block training/writer.py takes the place of."""
    replaced = {
        "checkpoint_serialization": "checkpoints are written in torch's zip format; leave it out",
        "use_node_local_storage": "rank 0 completes a checkpoint, so it has to see all of its "
        "files; set training.run_folder on a shared file system",
        "writer": "DeepSpeed's writers neither sync nor checksum, and training.save_in_background "
        "takes their place; leave it out",
    }
    for key, reason in replaced.items():
        if key in block:
            yield f"deepspeed.checkpoint.{key}: {reason}"


def _block(section: Mapping[str, Any], key: str) -> dict[str, Any]:
    block = section.get(key)
    return block if isinstance(block, dict) else {}


def _offload_device(zero: dict[str, Any], key: str) -> Any:
    return _block(zero, key).get("device", "none")


def _is_off(value: Any) -> bool:
    return (
        value is False or value == {} or (isinstance(value, dict) and value.get("enabled") is False)
    )


def _zero(block: dict[str, Any], section: Mapping[str, Any]) -> Iterator[str]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    stage, fields = block.get("stage", 0), DeepSpeedZeroConfig.model_fields
    for name, field in fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("deprecated") and name in block:
            new = str(extra["new_param"])
            new = (fields[new].alias or new) if new in fields else new
            yield f"{ZERO}.{name}: DeepSpeed's old name; write {new}"
    if stage not in (0, 1, 2, 3):
        return
    aliases = {field.alias: name for name, field in fields.items() if field.alias}
    given = {aliases.get(key, key): key for key in block if aliases.get(key, key) in fields}
    changed = {n for n, key in given.items() if block[key] not in ("auto", fields[n].default)}
    for name, key in given.items():
        if key == "stage" or (fields[name].json_schema_extra or {}):
            continue
        if stage == 0:
            yield f"{ZERO}.{key}: ZeRO is off at stage 0; set stage to 1, 2 or 3, or leave it out"
        elif stage < 3 and (name in STAGE_3_KEYS or name in aliases.values()):
            yield (
                f"{ZERO}.{key}: DeepSpeed reads it at stage 3 only and ignores it at stage "
                f"{stage}; set stage to 3, or leave it out"
            )
        elif stage == 3 and name in STAGE_1_2_KEYS & changed:
            yield f"{ZERO}.{key}: DeepSpeed ignores it at stage 3; leave it out"
    if "allgather_partitions" in changed:
        yield f"{ZERO}.allgather_partitions: DeepSpeed stores it and never reads it; leave it out"
    if block.get("legacy_stage1") is True:
        yield f"{ZERO}.legacy_stage1: DeepSpeed no longer has it and raises; leave it out"
    if stage in (1, 2) and block.get("compute_grad_norm") is False and section["gradient_clipping"]:
        yield f"{ZERO}.compute_grad_norm: DeepSpeed raises unless deepspeed.gradient_clipping is 0"
    if stage == 2 and block.get("reduce_scatter", True):
        yield from _prescaling(section)
    yield from _offload(block, stage)


def _prescaling(section: Mapping[str, Any]) -> Iterator[str]:
    if section.get("gradient_allreduce_op", "mean") == "sum":
        return
    for key, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        if section.get(key, default) != default:
            yield (
                f"deepspeed.{key}: DeepSpeed asserts at stage 2 with reduce_scatter; leave it out, "
                "or set zero_optimization.reduce_scatter to false"
            )


def _offload(block: dict[str, Any], stage: int) -> Iterator[str]:
    for key in OFFLOADS if stage == 3 else ():
        if _offload_device(block, key) == "nvme" and not block[key].get("nvme_path"):
            yield f"{ZERO}.{key}.nvme_path: missing; DeepSpeed needs a folder on the drive"
    if stage not in (1, 2):
        return
    optimizer = _block(block, "offload_optimizer")
    if optimizer.get("device") == "nvme":
        yield (
            f"{ZERO}.offload_optimizer.device: below stage 3 DeepSpeed takes nvme for cpu and "
            'writes nothing to the drive; set stage to 3, or "cpu"'
        )
    for key in optimizer.keys() - {"device", "pin_memory"}:
        yield f"{ZERO}.offload_optimizer.{key}: DeepSpeed ignores it below stage 3; leave it out"


def _checkpointing(config: RunConfig, section: Mapping[str, Any], device: str) -> Iterator[str]:
    block = _block(section, "activation_checkpointing")
    if not block:
        return
    if config.activation_checkpointing.backend != "deepspeed":
        yield (
            f"{CHECKPOINTING}: DeepSpeed only stores this section; no activation is checkpointed. "
            'Choose blocks in the run\'s own activation_checkpointing, with "backend": '
            '"deepspeed", or leave it out'
        )
    partition = block.get("partition_activations") is True
    if partition and not _tensor_parallel(section) > 1:
        partition = False
        yield (
            f"{CHECKPOINTING}.partition_activations: splits over the ranks of tensor parallelism, "
            "and there is none, so it saves no memory; leave it out, or set "
            "deepspeed.tensor_parallel.autotp_size"
        )
    if block.get("contiguous_memory_optimization") is True and not partition:
        yield (
            f"{CHECKPOINTING}.contiguous_memory_optimization: a buffer for partitioned activations "
            "only, without them DeepSpeed asserts; leave it out, or set partition_activations "
            "under tensor parallelism"
        )
    if block.get("cpu_checkpointing") is True and device == "cpu" and not partition:
        yield (
            f"{CHECKPOINTING}.cpu_checkpointing: on a CPU DeepSpeed crashes in backward (its copy "
            "is the emptied tensor itself); leave it out, the activations are in host memory"
        )


def _backend(config: RunConfig, section: Mapping[str, Any]) -> Iterator[str]:
    """With dropout, its mask is what backward asks for first, early enough."""
    settings = config.activation_checkpointing
    checkpoints = settings.policies == "auto" or "full" in settings.policies
    affected = settings.backend == "deepspeed" and not settings.reentrant and checkpoints
    stage = _block(section, "zero_optimization").get("stage", 0)
    if affected and stage == 3 and config.model.dropout == 0:
        yield (
            'activation_checkpointing.backend: "deepspeed" computes a block again in the midst of '
            "its last layer's backward, and ZeRO 3 then takes that layer's weights away: without "
            'dropout backward crashes. Use "torch", or "reentrant": true'
        )


def _tensor_parallel(section: Mapping[str, Any]) -> int:
    size = _block(section, "tensor_parallel").get("autotp_size", 0)
    return size if isinstance(size, int) else 0


def _data_types(section: Mapping[str, Any]) -> Iterator[str]:
    from deepspeed.runtime.config import DtypeEnum

    if _block(section, "bf16").get("check_grad_overflow") is False:
        yield (
            "deepspeed.bf16.check_grad_overflow: DeepSpeed would apply non-finite gradients at "
            "ZeRO stages 1 and 2; leave it out"
        )
    run = next((k for k in ("bf16", "fp16") if _block(section, k).get("enabled") is True), "fp32")
    known = [name for member in DtypeEnum for name in member._all_values if isinstance(name, str)]
    stage = _block(section, "zero_optimization").get("stage", 0)
    for key in ("grad_accum_dtype", "param_dtype"):
        value = _block(section, "data_types").get(key)
        where = f"deepspeed.data_types.{key}"
        if value in (None, "auto"):
            continue
        if value not in known:
            yield f"{where}: no such type {value!r}; {nearest(str(value), known)}"
        elif DtypeEnum(value) == DtypeEnum(run):
            continue
        elif key == "param_dtype":
            yield f"{where}: DeepSpeed asserts that it is the run's precision, {run}; leave it out"
        elif stage == 0:
            yield (
                f"{where}: at ZeRO stage 0 DeepSpeed adds gradients up in the run's precision "
                f"only, {run}, and raises; set zero_optimization.stage to 1"
            )


def _other(section: Mapping[str, Any]) -> Iterator[str]:
    zero = _block(section, "zero_optimization")
    if _block(section, "aio") and all(_offload_device(zero, key) != "nvme" for key in OFFLOADS):
        yield "deepspeed.aio: used for offload to nvme only, and there is none; leave it out"
    if section.get("managed_gradient_accumulation") is False:
        yield (
            "deepspeed.managed_gradient_accumulation: false makes DeepSpeed update the weights "
            "after every micro-batch of this trainer; leave it out"
        )


def _optimizer(section: Mapping[str, Any]) -> Iterator[str]:
    block = _block(section, "optimizer")
    kind, params = block.get("type"), _block(block, "params")
    if not isinstance(kind, str):
        return
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    where = "deepspeed.optimizer"
    found = implementation(kind, params, section)
    if isinstance(found, str):
        yield f"{where}.type: {found}"
        return
    known = accepted_params(kind, found, bool(params.get("torch_adam")))
    name = f"{found.__module__}.{found.__name__}" if found else "DeepSpeed's Muon"
    for key in params:
        if key == "max_grad_norm":
            yield f"{where}.params.{key}: DeepSpeed raises; set deepspeed.gradient_clipping instead"
        elif key not in known:
            yield f"{where}.params.{key}: {name} does not take it; {nearest(key, known)}"
    if kind.lower() == "adamw" and params.get("adam_w_mode") is False:
        yield f'{where}.params.adam_w_mode: DeepSpeed ignores it for AdamW; write "type": "Adam"'
    if params.get("amsgrad") is True and found and found.__module__.startswith("deepspeed."):
        yield f"{where}.params.amsgrad: {name} raises; set torch_adam to true"
    zero = _block(section, "zero_optimization").get("stage", 0) in (1, 2, 3)
    untested = found is not None and found not in ZERO_SUPPORTED_OPTIMIZERS
    if zero and untested and section.get("zero_allow_untested_optimizer") is not True:
        yield (
            f"{where}.type: DeepSpeed asserts that {kind} is untested with ZeRO; choose AdamW, or "
            "set deepspeed.zero_allow_untested_optimizer to true"
        )


def implementation(kind: str, params: Mapping[str, Any], section: Mapping[str, Any]) -> Any:
    """The class DeepSpeed builds for a type, None for its Muon, or what is wrong with the type."""
    import torch
    from deepspeed.ops import adagrad, adam, lamb, lion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    zero = _block(section, "zero_optimization")
    on_cpu = _offload_device(zero, "offload_optimizer") != "none"
    torch_adam = torch.optim.AdamW if params.get("adam_w_mode", True) else torch.optim.Adam
    deepspeed_adam = adam.DeepSpeedCPUAdam if on_cpu else adam.FusedAdam
    own = {
        "adam": torch_adam if params.get("torch_adam") else deepspeed_adam,
        "adamw": torch.optim.AdamW if params.get("torch_adam") else deepspeed_adam,
        "adagrad": adagrad.DeepSpeedCPUAdagrad if on_cpu else torch.optim.Adagrad,
        "lamb": lamb.FusedLamb,
        "lion": lion.DeepSpeedCPULion if on_cpu else lion.FusedLion,
        "muon": None,
    }
    if kind.lower() in own:
        return own[kind.lower()]
    if kind.lower() in DEEPSPEED_OPTIMIZERS:
        return f"{kind} comes from the package mup, which this project does not have"
    found = getattr(torch.optim, kind, None)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        closure = inspect.signature(found.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            return f"DeepSpeed calls step() without the closure that {kind} needs"
        return found
    classes = [name for name in dir(torch.optim) if name[0].isupper()]
    return f"neither DeepSpeed nor torch.optim has {kind!r}; {nearest(kind, [*own, *classes])}"


def accepted_params(kind: str, found: Any, torch_adam: bool) -> set[str]:
    """Parameters that have an effect: the constructor's, and those DeepSpeed takes out before."""
    if found is None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        halves = (*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS)
        return {*halves, "muon_lr", "adam_lr", "adam_w_mode", "torch_adam"}
    names = set(list(inspect.signature(found.__init__).parameters)[2:])
    if kind.lower() not in ("adam", "adamw"):
        return names
    # DeepSpeed itself passes adamw_mode to its CPU Adam, from adam_w_mode.
    return (names | {"torch_adam", "adam_w_mode"}) - {"adamw_mode"}


def warnings_of(config: RunConfig, section: Mapping[str, Any], world_size: int) -> list[str]:
    """Settings of a resolved section that work and do nothing useful, or surprise."""
    zero = _block(section, "zero_optimization")
    lines = []
    if world_size // max(1, _tensor_parallel(section)) == 1:
        offloads = any(_offload_device(zero, key) != "none" for key in OFFLOADS)
        if zero.get("stage", 0) > 0 and not offloads:
            lines.append(
                f"{ZERO}.stage={zero['stage']}: partitions nothing on one data-parallel rank"
            )
        if zero.get("overlap_comm") is True:
            lines.append(f"{ZERO}.overlap_comm: one data-parallel rank reduces nothing")
    bucket = zero.get("reduce_bucket_size")
    if isinstance(bucket, int | float) and bucket > config.model.parameter_count():
        lines.append(
            f"{ZERO}.reduce_bucket_size={bucket:,.0f}: DeepSpeed allocates it whole, and the model "
            f"has {config.model.parameter_count():,} parameters; leave it out"
        )
    lines += [
        f"deepspeed.{key}: DeepSpeed's curves count samples on the x axis, not steps"
        for key in MONITORS
        if _block(section, key).get("enabled") is True
    ]
    if "zero_force_ds_cpu_optimizer" in section:
        lines.append(
            "deepspeed.zero_force_ds_cpu_optimizer: no effect; DeepSpeed asks for it only when "
            "the optimizer is an object of the caller, not named in the configuration"
        )
    checkpointed = set(config.activation_checkpointing.policies) - {"none"}  # or "auto"
    if _block(section, "activation_checkpointing") and not checkpointed:
        lines.append(f"{CHECKPOINTING}: no effect; activation_checkpointing.policies is empty")
    return lines + _accumulation(section, zero)


def _accumulation(section: Mapping[str, Any], zero: Mapping[str, Any]) -> list[str]:
    """bfloat16 has 8 significant bits: in a sum of 16 gradients the last has half of them left."""
    count = section["gradient_accumulation_steps"]
    wide = _block(section, "data_types").get("grad_accum_dtype") in ("fp32", "float32", "float")
    if count < 16 or wide or not _block(section, "bf16").get("enabled"):
        return []
    stage = "" if zero.get("stage", 0) else "zero_optimization.stage to 1 and "
    return [
        f"deepspeed.gradient_accumulation_steps={count}: DeepSpeed adds the gradients up in "
        f'bfloat16, which loses small ones; set {stage}data_types.grad_accum_dtype to "fp32"'
    ]
