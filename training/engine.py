"""Ranks, process group, device, the DeepSpeed engine and its step.

Together with launch/ this is the only place that reads the environment.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from configs.deepspeed import Hardware, precision
from configs.schedule import learning_rate
from configs.schema import RunConfig
from memory.recompute import explain_recomputation
from model.gpt import GPT, build, initialise, parameter_groups
from training import extensions, tensor_parallel
from training.documents import separator_of
from training.weights import start_from

# Environment of one rank under launchers that do not set torch's names: rank, local rank, size.
MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)


@dataclass(frozen=True)
class Ranks:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Ranks on this host."""
    device: torch.device
    tensor_parallel: int = 1
    """Neighbouring ranks that hold one replica of the model together."""

    @property
    def data_rank(self) -> int:
        """The replica this rank belongs to: it decides which samples are read."""
        return self.rank // self.tensor_parallel

    @property
    def data_ranks(self) -> int:
        return self.world_size // self.tensor_parallel

    def hardware(self) -> Hardware:
        cuda = self.device.type == "cuda"
        bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        return Hardware(self.world_size, self.device.type, bf16)


def read_ranks(local_rank_argument: int | None = None) -> Ranks:
    """This process's place, from the launcher's variables; alone when there is no launcher.

    The five variables torch needs are completed in the environment, so that no MPI is looked for.

    Raises:
        ValueError: the launcher's variables contradict each other or the command line.
    """
    env = os.environ
    if "RANK" not in env:
        _adopt_mpi_names()
    if "RANK" not in env:
        if _integer("WORLD_SIZE", 1) > 1:
            raise ValueError(f"WORLD_SIZE={env['WORLD_SIZE']} but RANK is not set: use a launcher")
        env.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
        env.setdefault("MASTER_PORT", _free_port())
    rank, world_size = _integer("RANK", 0), _integer("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    env.setdefault("LOCAL_RANK", str(local_rank_argument or 0))
    local_rank = _integer("LOCAL_RANK", 0)
    if local_rank_argument not in (None, local_rank):
        raise ValueError(f"--local_rank={local_rank_argument} contradicts LOCAL_RANK={local_rank}")
    # torchrun and DeepSpeed's launcher use different names for the ranks of one host.
    local_world_size = _integer("LOCAL_WORLD_SIZE", _integer("LOCAL_SIZE", 1))
    name = get_accelerator().device_name()
    device = torch.device(name) if name == "cpu" else torch.device(name, local_rank)
    return Ranks(rank, local_rank, world_size, local_world_size, device)


def job_end() -> float | None:
    """When SLURM will end the job, in seconds since the epoch; None where it does not tell."""
    end = _integer("SLURM_JOB_END_TIME", 0)
    return float(end) if end else None


def _adopt_mpi_names() -> None:
    for rank, local_rank, size in MPI_NAMES:
        if _integer(size, 1) > 1:
            if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
                raise ValueError(f"{size}={os.environ[size]}: also set MASTER_ADDR and MASTER_PORT")
            for name, source in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", size)):
                if source not in os.environ:
                    raise ValueError(f"{size} is set but not {source}: set {name} yourself")
                os.environ[name] = os.environ[source]


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdigit():
        raise ValueError(f"{name}={text!r} in the environment: expected a whole number")
    return int(text or default)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_process_group(ranks: Ranks, *, expandable_segments: bool = False) -> None:
    """Set this rank's device up, join the other ranks, share this host's cores among its ranks.

    Raises:
        ConnectionError: the rendezvous address is taken or does not answer.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // ranks.local_world_size))
    if expandable_segments:
        _expand_segments()
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    # A shared-memory all-reduce that only inference uses; building it takes minutes and a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        deepspeed.init_distributed(verbose=False)
    except torch.distributed.DistNetworkError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(
            f"rank {ranks.rank} cannot use the master address {address}: "
            f"{str(error).splitlines()[0]}; choose another port (--master_port)"
        ) from None


def _expand_segments() -> None:
    """Before the first allocation on the device: segments that exist would stay as they are.

    By torch's call, as the variable's name and when it is read change between versions. The call
    forgets what it does not name, so the user's own settings are repeated.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    settings = [given, "expandable_segments:True"] if given else ["expandable_segments:True"]
    torch._C._accelerator_setAllocatorSettings(",".join(settings))


def leave(code: int) -> NoReturn:
    """Exit without Python's shutdown, everything being written and closed.

    A DeepSpeed engine outlives its last name, and with it gloo's threads. One that runs while
    Python shuts down aborts the process ("terminate called without an active exception"): 10 exits
    of 28 in a minimal two-rank script.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_engine(
    config: RunConfig, section: dict[str, Any], ranks: Ranks, initial: Path | None = None
) -> Any:
    """The initialised GPT inside a DeepSpeed engine, with its optimizer and schedule.

    Args:
        initial: a folder of weights to start from, rather than at random.

    Raises:
        ConfigError: documents are to be masked, and the corpora do not say what ends them; or the
            initial weights are damaged.
        BuildError: the optimizer has to be compiled, and cannot be.
    """
    extensions.load_optimizer(section, ranks.local_rank)
    unpartitioned_float32 = (
        section["zero_optimization"].get("stage", 0) == 0 and precision(section) == torch.float32
    )
    if unpartitioned_float32 and not section["gradient_clipping"]:
        section = {**section, "gradient_clipping": math.inf}  # the norm is taken while clipping
    mpu = None
    if ranks.tensor_parallel > 1:
        section, mpu = tensor_parallel.configure(config.model, section, ranks.tensor_parallel)
    model = _build_model(config, section, ranks.device, mpu)
    if initial:
        partitioned = section["zero_optimization"].get("stage") == 3
        start_from(model, initial, _gather if partitioned else nullcontext)
    groups = parameter_groups(
        model,
        weight_decay=section["optimizer"]["params"].get("weight_decay", 0.0),
        decay_embeddings=config.training.decay_embeddings,
    )
    if mpu:
        tensor_parallel.separate_attention_masks(model, ranks.device)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        config=section,
        lr_scheduler=partial(Schedule, section=section),
        dist_init_required=False,
        mpu=mpu,
    )
    if config.training.compile_blocks:
        _compile_blocks(engine.module)
    if unpartitioned_float32:
        engine.clip_fp32_gradients = partial(_clip_gradients, engine)
        _skip_on_overflow(engine.optimizer)
    _check_gradients(engine.optimizer)
    if engine.zero_optimization_stage() == 0 and ranks.data_ranks == 1:
        engine.enable_backward_allreduce = False  # it would copy all gradients to a buffer and back
    return engine


def _build_model(config: RunConfig, section: dict[str, Any], device: torch.device, mpu: Any) -> GPT:
    training, separator = config.training, separator_of(config.data)
    if section["zero_optimization"].get("stage", 0) < 3:
        return build(
            config.model,
            seed=training.seed,
            device=device,
            dtype=precision(section),
            loss=training.loss,
            z_loss=training.z_loss,
            separator=separator,
        )
    # Each module is partitioned as soon as it exists: no rank ever holds the whole model.
    # Its dtype comes from the config: on a device without float16 the dtype argument is ignored.
    group = mpu.get_data_parallel_group() if mpu else None
    with deepspeed.zero.Init(config_dict_or_path=section, mpu=mpu, data_parallel_group=group):
        model = GPT(config.model, loss=training.loss, z_loss=training.z_loss, separator=separator)
    initialise(model, training.seed, _gather)
    return model


def _gather(parameter: Tensor) -> AbstractContextManager[Any]:
    """A parameter of stage 3 whole, to be written to by the first rank for all."""
    whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        parameter, modifier_rank=0
    )
    return whole


def _compile_blocks(model: GPT) -> None:
    """In place: no parameter is renamed, and the blocks share what is compiled."""
    from torch._inductor import config as inductor  # imported here: it takes a second

    # Else compiled dropout would draw from a generator of its own, which no seed_step sets.
    inductor.fallback_random = True
    for block in model.blocks:
        block.compile()


def _clip_gradients(engine: Any) -> None:
    """Clip at stage 0 in float32, where DeepSpeed's own clipping throws the norm away."""
    parameters, limit = list(engine.module.parameters()), engine.gradient_clipping()
    if engine.autotp_size() > 1:
        norm = tensor_parallel.gradient_norm(parameters)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    engine._global_grad_norm = norm
    engine.optimizer.overflow = not bool(norm.isfinite())


def _skip_on_overflow(optimizer: Any) -> None:
    """Skip updates as DeepSpeed's own optimizers do, which tell its engine by `overflow`."""
    step = optimizer.step

    @wraps(step)  # the learning rate's scheduler has marked it
    def step_unless_overflow() -> Any:
        return None if optimizer.overflow else step()

    optimizer.step = step_unless_overflow


def _check_gradients(optimizer: Any) -> None:
    """See that no other optimizer of DeepSpeed (0.19.8) applies non-finite gradients either.

    All skip such an update, but stages 1 and 2 only where they take a norm or are told to look. An
    fp16 loss scale at its minimum would end the run without a report.
    """
    if hasattr(optimizer, "check_grad_overflow") and not optimizer.compute_grad_norm:
        optimizer.check_grad_overflow = True
    scaler: Any = getattr(optimizer, "loss_scaler", None)
    if hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    """configs/schedule.py's learning rate on every parameter group."""

    def __init__(self, optimizer: torch.optim.Optimizer, section: dict[str, Any]) -> None:
        self.section = section
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        lr = learning_rate(self.section, self.last_epoch + 1)
        return [lr for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout a pure function of (seed, step, data-parallel rank).

    Replicas draw different masks, and a resumed run draws the same ones without stored generator
    states.
    """
    digest = hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))


def train_step(
    engine: Any,
    batches: Iterator[tuple[Tensor, Tensor]],
    judge: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """One optimizer step; returns this rank's mean loss, left on the device.

    DeepSpeed counts the micro-batches: it divides each loss by the accumulation steps, and only
    the last engine.step() of them reduces, clips and updates.

    Args:
        judge: given the mean loss before the last backward pass, a factor for that pass: 1, or NaN,
            which every gradient becomes on every rank, so that the update is skipped.
    """
    accumulation_steps = engine.gradient_accumulation_steps()
    total = torch.zeros((), device=engine.device)
    for remaining in reversed(range(accumulation_steps)):
        inputs, targets = next(batches)  # each [micro-batch, sequence length]
        loss = engine(inputs, targets)
        total += loss.detach()
        if judge and not remaining:
            loss = loss * judge(total / accumulation_steps)
        with explain_recomputation(engine.module):
            engine.backward(loss)
        engine.step()
    if not engine.was_step_applied():
        engine.lr_scheduler.step()  # the learning rate follows the step, not the count of updates
    return total / accumulation_steps
