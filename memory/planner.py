"""Predicts what a run needs of each GPU and of each host.

Neither a GPU nor DeepSpeed is needed: the model's code runs on fake tensors, and what DeepSpeed
would allocate around it is replayed (memory/states.py).
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from configs.deepspeed import precision, resolve, tensor_parallel_size
from configs.schema import RunConfig
from memory.activations import Shape, Traced, trace
from memory.cost import SPEEDS, StepTime, step_time
from memory.ledger import Category, Ledger, Sample
from memory.machine import Machine, show_bytes
from memory.policies import Policy
from memory.staging import staged
from memory.states import Parameter, Setup, states_of
from memory.timeline import Timeline
from model.config import ModelConfig
from model.gpt import GPT, parameter_rules
from model.loss import LossMethod
from model.partition import cuts

GIB = 2**30
CUDA_CONTEXT = int(0.6 * GIB)
NCCL = int(0.5 * GIB)
CUBLAS_WORKSPACE = 32 * 2**20
HOST_PROCESS = 3 * GIB
"""Allowances: assumed, not measured. The first two lie outside torch's allocator."""
CUDA_GRANULARITY = 512
LOADER_BATCHES = 4
"""Micro-batches that data/loader.py reads ahead."""


@dataclass(frozen=True)
class Place:
    """One GPU, or one host with its ranks."""

    timeline: tuple[Sample, ...]
    limit: int | None

    @property
    def peak(self) -> Sample:
        return max(self.timeline, key=lambda sample: sample.total)

    @property
    def shortfall(self) -> int:
        """Bytes that are missing; 0 where it fits."""
        return 0 if self.limit is None else max(0, self.peak.total - self.limit)


@dataclass(frozen=True)
class Plan:
    machine: Machine
    policies: tuple[Policy, ...]
    gpu: Place
    host: Place
    step: StepTime
    checkpoint_bytes: int
    """On disk, of one checkpoint: all ranks' files."""
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.gpu.shortfall and not self.host.shortfall

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes, per GPU and per host."""
        gpu, host = self.gpu, self.host
        return {
            "fits": self.fits,
            "gpu": {
                "peak_bytes": gpu.peak.total,
                "limit_bytes": gpu.limit,
                "by_category": categories(gpu.peak),
                "peak_moment": gpu.peak.moment,
            },
            "host": {
                "peak_bytes": host.peak.total,
                "limit_bytes": host.limit,
                "by_category": categories(host.peak),
            },
            "policies": list(self.policies),
            "step_seconds_estimate": self.step.total,
            "assumptions": list(self.assumptions),
        }


def categories(sample: Sample) -> dict[str, int]:
    return {category: sample.by_category.get(category, 0) for category in get_args(Category)}


class Planner:
    """A run on a machine: everything that does not depend on the blocks' policies, done once."""

    def __init__(self, config: RunConfig, machine: Machine) -> None:
        self.config, self.machine = config, machine
        self.section = resolve(config, machine.hardware, ask_deepspeed=False)
        self.dtype = precision(self.section)
        self.tensor_parallel = tensor_parallel_size(self.section)
        self.setup = Setup(
            parameters=model_parameters(
                config.model, config.training.decay_embeddings, self.tensor_parallel
            ),
            section=self.section,
            data_ranks=machine.gpus // self.tensor_parallel,
            element=self.dtype.itemsize,
            accumulation_steps=self.section["gradient_accumulation_steps"],
            device=machine.device,
            device_memory=None
            if machine.device == "cpu" or machine.gpu_memory is None
            else machine.gpu_memory - self._gpu_allowance(),
        )

    @property
    def shape(self) -> Shape:
        return Shape(
            self.section["train_micro_batch_size_per_gpu"],
            self.config.training.sequence_length,
            self.dtype,
            self.machine.device,
            self.tensor_parallel,
            self.config.data.document_masking,
        )

    @functools.cached_property
    def traced(self) -> Traced:
        training, settings = self.config.training, self.config.activation_checkpointing
        early_stop = settings.backend == "torch"
        return _trace(self.config.model, self.shape, training.loss, training.z_loss, early_stop)

    @property
    def granularity(self) -> int:
        return 1 if self.machine.device == "cpu" else CUDA_GRANULARITY

    def replay(self, policies: Sequence[Policy]) -> Ledger:
        """What one rank has alive in initialisation and two steps, without allowances."""
        ledger = Ledger(
            granularity=self.granularity,
            places=("gpu",) if self.machine.device == "cpu" else ("gpu", "host"),
        )
        tied = self.config.model.tied_embeddings
        Timeline(ledger, self.traced, policies, states_of(self.setup), tied=tied).run()
        return ledger

    def plan(self, policies: Sequence[Policy]) -> Plan:
        machine = self.machine
        ledger = self.replay(policies)
        timelines, ranks = ledger.timeline, machine.ranks_per_node
        host = [_scaled(sample, ranks) for sample in timelines.get("host", timelines["gpu"])]
        written = staged(ledger, self.setup)
        if self.config.training.save_in_background:
            host += _saving(host, written.on_host(ranks, self.tensor_parallel))
        return Plan(
            machine,
            tuple(policies),
            Place(_with_allowance(timelines["gpu"], self._gpu_allowance()), machine.gpu_memory),
            Place(_with_allowance(host, self._host_allowance()), machine.host_memory),
            self.step_time(policies),
            written.on_host(machine.gpus, self.tensor_parallel),
            self._assumptions(),
        )

    def step_time(self, policies: Sequence[Policy]) -> StepTime:
        return step_time(
            self.traced,
            policies,
            self.section,
            parameters=sum(parameter.size for parameter in self.setup.parameters),
            data_ranks=self.setup.data_ranks,
            element=self.setup.element,
            accumulation_element=self.setup.accumulation_element,
            speeds=SPEEDS[self.machine.kind],
        )

    def _gpu_allowance(self) -> int:
        if self.machine.device == "cpu":
            return 0
        return CUDA_CONTEXT + CUBLAS_WORKSPACE + (NCCL if self.machine.gpus > 1 else 0)

    def _host_allowance(self) -> int:
        if self.machine.device == "cpu":
            return 0
        batch = self.section["train_micro_batch_size_per_gpu"] * (
            self.config.training.sequence_length + 1
        )
        return self.machine.ranks_per_node * (HOST_PROCESS + LOADER_BATCHES * batch * 8)

    def _assumptions(self) -> tuple[str, ...]:
        if self.machine.device == "cpu":
            return ("what torch's allocator holds, without the interpreter and its libraries",)
        lines = [
            f"CUDA context {CUDA_CONTEXT / GIB:.1f} GiB, NCCL {NCCL / GIB:.1f} GiB, cuBLAS "
            f"{CUBLAS_WORKSPACE / 2**20:.0f} MiB; {HOST_PROCESS / GIB:.0f} GiB of host memory for "
            "each process: assumed",
            "no fragmentation: set training.expandable_segments where the margin is small",
            f"step time from data sheets ({self.machine.kind}), to compare settings by",
        ]
        zero = self.section["zero_optimization"]
        offloads = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
        if any(offload.get("device") == "nvme" for offload in offloads):
            locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "unlimited" if locked == resource.RLIM_INFINITY else show_bytes(locked)
            lines.append(f"NVMe's buffers may be locked in memory: ulimit -l (here: {limit})")
        if self.config.training.save_in_background and not self.setup.offloads_optimizer:
            lines.append(
                "copies of GPU tensors for background saves without what PyTorch rounds "
                "page-locked memory up by: at most once more their size"
            )
        if zero.get("stage", 0) < 3 and (zero.get("offload_param") or {}).get("device"):
            lines.append("offload_param saves nothing below ZeRO stage 3: DeepSpeed ignores it")
        return tuple(lines)


@functools.cache
def _trace(
    model: ModelConfig, shape: Shape, loss: LossMethod, z_loss: float, early_stop: bool
) -> Traced:
    traced = trace(model, shape, loss=loss, z_loss=z_loss, early_stop=early_stop)
    traced.blocks["offload"] = traced.blocks["full"]  # Timeline moves the input
    return traced


@functools.cache
def model_parameters(
    model: ModelConfig, decay_embeddings: bool, tensor_parallel: int
) -> tuple[Parameter, ...]:
    """One rank's, in the order of model.named_parameters()."""
    with torch.device("meta"):
        whole = GPT(model)
    rules = parameter_rules(whole, decay_embeddings=decay_embeddings)
    cut = {name: cut.by for name, cut in cuts(model).items()}
    found = []
    for name, parameter in whole.named_parameters():
        layer, _, kind = name.rpartition(".")
        by = cut.get(".".join(layer.split(".")[2:]))
        is_cut = by == "columns" or (by == "rows" and kind == "weight")
        size = parameter.numel() // (tensor_parallel if is_cut else 1)
        found.append(Parameter(name, size, rules[name].decay))
    return tuple(found)


def _saving(timeline: Sequence[Sample], size: int) -> list[Sample]:
    """Another step, like the last, while a save is under way: with `size` bytes of copies."""
    last = max(n for n, sample in enumerate(timeline) if sample.moment == "embedding forward")
    return [
        Sample(moment, total + size, {**held, "buffers": held.get("buffers", 0) + size})
        for moment, total, held in timeline[last:]
    ]


def _scaled(sample: Sample, ranks: int) -> Sample:
    by_category = {category: size * ranks for category, size in sample.by_category.items()}
    return Sample(sample.moment, sample.total * ranks, by_category)


def _with_allowance(timeline: Sequence[Sample], size: int) -> tuple[Sample, ...]:
    return tuple(
        Sample(moment, total + size, {**by_category, "allowance": size})
        for moment, total, by_category in timeline
    )
