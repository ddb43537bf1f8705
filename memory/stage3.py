"""ZeRO stage 3: every parameter, gradient, master weight and optimizer state is cut over the ranks.

DeepSpeed puts a parameter together when a module that holds it begins and takes it apart when the
module ends. From the second forward and backward on it knows the order of the modules: it fetches
ahead of use, and keeps what is needed again soon.

Measured on a CPU: all but what is said to be read only. On a CPU all ranks talk through gloo, which
copies what it gathers or reduces and scatters; on CUDA the copies are not there (read). Also read
only, as a CPU has neither: offload on CUDA (what lives in host memory, page-locked or not, and
copies between the two) and offload to NVMe. Not modelled: quantized weights or gradients,
zero_hpz_partition_size, use_all_reduce_for_fetch_params, module_granularity_threshold and leaf
modules, ZenFlow, SuperOffload.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memory.ledger import Category, Ledger, Place
from memory.states import Parameter, Setup, States

# Defaults of deepspeed.runtime.zero.config and offload_config that decide sizes; a test compares.
ZERO_DEFAULTS: dict[str, Any] = {
    "allgather_sequential": False,
    "contiguous_gradients": True,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "model_persistence_threshold": sys.maxsize,
    "param_persistence_threshold": 100_000,
    "prefetch_bucket_size": 50_000_000,
    "reduce_bucket_size": 500_000_000,
    "reduce_scatter": True,
    "sub_group_size": 1_000_000_000,
}
OPTIMIZER_OFFLOAD_DEFAULTS = {"buffer_count": 4, "pin_memory": True, "ratio": 1.0}
PARAMETER_OFFLOAD_DEFAULTS = {
    "buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000, "pin_memory": True
}  # fmt: skip
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "float32": 4, "float16": 2, "bfloat16": 2}
NORM_ELEMENT = 8
"""Norms are summed in float64 (deepspeed.runtime.zero.utils.get_norm_dtype)."""
NORM_CHUNK = 250_000_000
"""Elements of a norm's copy (DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2)."""
SWAP_MINIMUM = 1024**2
"""Smallest tensor in bytes that goes to NVMe (swap_tensor.constants MIN_AIO_BYTES)."""

Status = Literal["partitioned", "in flight", "available"]
GLOO_THREADS = 2
"""torch's ProcessGroupGloo, by default."""
NEVER = -(10**10)


@dataclass(eq=False)
class Shard:
    """A parameter, its share on this rank, and where its whole is."""

    parameter: Parameter
    share: int
    """Elements on one rank, the last one's padding included."""
    padded: int
    """Elements of all shares."""
    persists: bool = False
    status: Status = "partitioned"
    held: int = 0
    """Bytes of the whole, while it is together and no alias of the share."""
    active: set[str] = field(default_factory=set)
    handle: Gather | None = None
    fetched_for: int = NEVER
    """Step of the trace for which it was fetched last."""

    @property
    def size(self) -> int:
        return self.parameter.size


@dataclass(eq=False)
class Gather:
    """An all-gather that has been started (AllGatherCoalescedHandle and its kin)."""

    shards: list[Shard]
    buffer: int = 0
    """Bytes of the one buffer that several parameters are gathered in, and copied from."""
    staged: int = 0
    """Bytes of the share's copy on the device, where it is kept elsewhere."""
    complete: bool = False
    waiting: set[Shard] = field(default_factory=set)


class Coordinator:
    """PartitionedParameterCoordinator: which parameters are together, and when."""

    def __init__(self, shards: Sequence[Shard], zero: Mapping[str, Any], setup: Setup) -> None:
        self.shards = shards
        self.zero = zero
        self.ranks, self.element = setup.data_ranks, setup.element
        self.gloo = setup.device == "cpu"
        self.staging = not self.gloo and offload_device(zero, "offload_param") != "none"
        self.modules: dict[str, list[Shard]] = {}
        for shard in shards:
            name = shard.parameter.name.rpartition(".")[0]
            self.modules.setdefault(name, []).append(shard)
        if "head" not in self.modules:
            self.modules["head"] = self.modules["token_embedding"]  # tied: both hold the weight
        self.mode: Literal["invalid", "record", "complete"] = "invalid"
        self.order: list[str] = []
        self.queue: deque[tuple[Shard, int]] = deque()
        self.step = 0
        self.live = 0
        """Elements of parameters that are together."""
        self.entered: set[str] = set()
        self.in_backward: dict[str, None] = {}
        self.released_after: dict[tuple[str, int], frozenset[Shard]] = {}
        self.aliases: dict[str, int] = {}
        """Bytes by module that a recomputation still refers to after their release."""

    def reset_step(self, ledger: Ledger) -> None:
        """reset_step, before each forward of the model: the second one ends the recording."""
        for shard in self.shards:
            if shard.handle:
                self._wait(ledger, shard)
                self._apart(ledger, shard)
            shard.fetched_for = NEVER
        if self.mode == "record":
            self.mode = "complete"
        elif self.mode == "invalid":
            self.mode = "record"
        self.queue.clear()
        if self.mode == "complete":
            for step, module in enumerate(self.order):
                self.queue.extend((shard, step) for shard in self.modules.get(module, ()))
        self.step = self.live = 0
        self.entered = set()

    def enter(self, ledger: Ledger, module: str, *, backward: bool) -> None:
        """Fetch what a module needs; the modules around it come first, and they fetch ahead, too.

        A module around it is entered once in a forward, once in a recomputation and once in a
        backward, just before its first module with parameters; the model is not recomputed.
        """
        phase = "backward" if backward else ("recomputed" if self.in_backward else "forward")
        for around in containers(module):
            if (around or phase != "recomputed") and f"{phase} {around}" not in self.entered:
                self.entered.add(f"{phase} {around}")
                self._fetch(ledger, around)
                if backward:
                    self.in_backward[around] = None
        if backward:
            self.in_backward[module] = None
        self._fetch(ledger, module)

    def _fetch(self, ledger: Ledger, module: str) -> None:
        """_fetch_sub_module_impl."""
        if self.mode == "record":
            self.order.append(module)
        wanted = self.modules.get(module, [])
        self._gather(ledger, wanted)
        for shard in wanted:
            shard.active.add(module)
            if shard.handle:
                self._wait(ledger, shard)
        if self.mode == "complete":
            self._prefetch(ledger, wanted)
        self.step += 1

    def _prefetch(self, ledger: Ledger, wanted: Sequence[Shard]) -> None:
        """From NVMe DeepSpeed fetches only what has been read by then: less than here (read)."""
        due = sum(shard.fetched_for < self.step for shard in wanted)
        popped: set[Shard] = set()
        while self.queue and len(popped) < due:
            shard, shard.fetched_for = self.queue.popleft()
            popped.add(shard)
        room = min(self.zero["max_live_parameters"] - self.live, self.zero["prefetch_bucket_size"])
        ahead: list[Shard] = []
        while self.queue and sum(shard.size for shard in ahead) < room:
            shard, step = self.queue.popleft()
            shard.fetched_for = max(shard.fetched_for, step)
            if shard.status == "partitioned" and shard not in ahead:
                ahead.append(shard)
        self._gather(ledger, ahead)

    def _gather(self, ledger: Ledger, shards: Iterable[Shard]) -> None:
        """__all_gather_params and Init's all_gather_coalesced: started, not waited for.

        Several parameters are gathered in one buffer, from which each is copied once it is needed;
        the buffer stays until the last of them is. One alone is gathered in place.
        """
        apart = [shard for shard in shards if shard.status == "partitioned"]
        if not apart:
            return
        handle = Gather(apart, waiting=set(apart))
        share = self.element * sum(shard.share for shard in apart)
        for shard in apart:
            shard.status, shard.handle = "in flight", handle
            self.live += shard.size
        if self.ranks == 1:
            for shard in apart:
                self._hold(ledger, shard, self.element * shard.size if self.staging else 0)
        elif self.zero["allgather_sequential"] or len(apart) == 1:
            for shard in apart:
                self._hold(ledger, shard, self.element * shard.padded)
                self._collective(ledger, self.element * shard.padded)
            handle.staged = share if self.staging else 0
            ledger.allocate("transient", handle.staged)
        else:
            handle.buffer = share * self.ranks
            ledger.allocate("transient", handle.buffer)
            temporary(ledger, share if self.staging else 0)
            self._collective(ledger, handle.buffer)

    def _wait(self, ledger: Ledger, shard: Shard) -> None:
        handle = shard.handle
        assert handle is not None
        if not handle.complete:
            handle.complete = True
            ledger.free("transient", handle.staged)
            for other in handle.shards:
                other.status = "available"
                if handle.buffer:
                    self._hold(ledger, other, self.element * other.size)
        shard.handle = None
        handle.waiting.discard(shard)
        if not handle.waiting:
            ledger.free("transient", handle.buffer)

    def leave(self, ledger: Ledger, module: str, *, backward: bool) -> None:
        """release_sub_module.

        What torch's checkpoint recomputes it keeps detached: a parameter that is released then and
        fetched again for backward is there twice until backward has used the first.
        """
        wanted = self.modules.get(module, [])
        apart = self._released_after(module) if self.mode == "complete" else wanted
        if backward:
            self.in_backward.pop(module, None)
            self.drop_aliases(ledger, module)
        for shard in wanted:
            shard.active.discard(module)
            if shard in apart:
                held = shard.held
                self._apart(ledger, shard)
                if self.in_backward and not backward and not shard.held:
                    ledger.allocate("parameters", held)
                    self.aliases[module] = self.aliases.get(module, 0) + held

    def drop_aliases(self, ledger: Ledger, module: str) -> None:
        ledger.free("parameters", self.aliases.pop(module, 0))

    def _released_after(self, module: str) -> frozenset[Shard]:
        """__params_to_release: decided once for each step of the trace."""
        key = module, self.step
        if key not in self.released_after:
            wanted = self.modules[module]
            apart = {s for s in wanted if not s.persists and s.fetched_for <= self.step}
            passed = 0
            for following in self.order[self.step :]:
                if passed >= self.zero["max_reuse_distance"] or not apart:
                    break
                for shard in self.modules.get(following, ()):
                    apart.discard(shard)
                    passed += shard.size
            self.released_after[key] = frozenset(apart)
        return self.released_after[key]

    def end_backward(self, ledger: Ledger) -> None:
        """release_backward_leftovers: an embedding's input has no gradient to end it by."""
        for module in self.in_backward:
            for shard in self.modules.get(module, ()):
                shard.active.discard(module)
                if not shard.persists:
                    self._apart(ledger, shard)
        self.in_backward.clear()

    def release_all(self, ledger: Ledger) -> None:
        """release_and_reset_all, which begins an optimizer step."""
        for shard in self.shards:
            if shard.handle:
                self._wait(ledger, shard)
            shard.active.clear()
            self._apart(ledger, shard)

    def gather_now(self, ledger: Ledger, shards: Sequence[Shard]) -> None:
        """Init's _all_gather, outside of forward and backward: each in a buffer of its own.

        One rank gathers several parameters for nothing, but copies one alone. Of several at once
        gloo makes as many copies together as it has threads, at worst of the largest.
        """
        apart = [shard for shard in shards if shard.status == "partitioned"]
        alone = len(apart) == 1 or self.zero["allgather_sequential"]
        sizes = [self.element * shard.padded for shard in apart]
        shares = self.element * sum(s.share for s in apart) if self.staging else 0
        if self.ranks == 1 and not alone:
            for shard in apart:
                self._hold(ledger, shard, self.element * shard.size if self.staging else 0)
        else:
            ledger.allocate("transient", shares)
            for shard, size in zip(apart, sizes, strict=True):
                self._hold(ledger, shard, size)
            self._collective(ledger, sum(sorted(sizes)[-GLOO_THREADS:]))
            ledger.free("transient", shares)
        for shard in apart:
            shard.status = "available"

    def take_apart(self, ledger: Ledger, shards: Iterable[Shard]) -> None:
        """partition, outside of forward and backward."""
        live = self.live
        for shard in shards:
            self._apart(ledger, shard)
        self.live = live

    def _apart(self, ledger: Ledger, shard: Shard) -> None:
        """__release_param."""
        if shard.status == "available" and not shard.active:
            ledger.free("parameters", shard.held)
            shard.held, shard.status = 0, "partitioned"
            self.live -= shard.size

    def _hold(self, ledger: Ledger, shard: Shard, size: int) -> None:
        ledger.allocate("parameters", size)
        shard.held = size

    def _collective(self, ledger: Ledger, size: int) -> None:
        """gloo gathers in a buffer of its own."""
        temporary(ledger, size if self.gloo else 0)


class Stage3States(States):
    """DeepSpeedZeroOptimizer_Stage3 on parameters made under zero.Init.

    Shares are cut with the padding of the last rank, so all ranks hold the same.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.zero = zero_options(setup.section)
        self.element = setup.element
        self.shards = [shard_of(parameter, setup.data_ranks) for parameter in setup.parameters]
        self._mark_persistent()
        self.by_name = {shard.parameter.name: shard for shard in self.shards}
        self.coordinator = Coordinator(self.shards, self.zero, setup)
        self.sub_groups = [
            group
            for decays in (True, False)
            for group in self._sub_groups([s for s in self.shards if s.parameter.decays == decays])
        ]
        offload = {**OPTIMIZER_OFFLOAD_DEFAULTS, **(self.zero.get("offload_optimizer") or {})}
        self.offloads = offload_device(self.zero, "offload_optimizer") != "none"
        self.swaps = offload_device(self.zero, "offload_optimizer") == "nvme"
        self.on_device = int((1 - offload["ratio"]) * len(self.sub_groups)) if self.offloads else 0
        self.pins = self.offloads and offload["pin_memory"] and setup.device != "cpu"
        self.swap_buffers = offload["buffer_count"]
        self.home: Place = "host" if self.offloads else "gpu"
        """Where gradients are kept, and master weights and optimizer states but for a ratio."""
        precisions = {kind: setup.section.get(kind, {}) for kind in ("bf16", "fp16")}
        narrow = any(
            block.get("enabled") and block.get(f"{kind}_master_weights_and_grads")
            for kind, block in precisions.items()
        )
        self.master = 2 if narrow else 4
        sums = setup.section.get("data_types", {}).get("grad_accum_dtype")
        self.sums = DTYPE_BYTES[sums] if sums else self.element
        reduced = setup.section.get("communication_data_type")
        self.reduced = DTYPE_BYTES[reduced] if reduced else self.element
        self.bucket: list[Shard] = []
        self.own_gradients: set[Shard] = set()
        """In the bucket's list, but too large for its buffer."""
        self.micro_batch = 0
        self.forward_is_next = True

    def _mark_persistent(self) -> None:
        """DeepSpeedZeRoOffload.mark_persistent_parameters."""
        total = 0
        for shard in self.shards:
            if total + shard.size > self.zero["model_persistence_threshold"]:
                continue
            if shard.size <= self.zero["param_persistence_threshold"]:
                shard.persists = True
                total += shard.size

    def _sub_groups(self, group: list[Shard]) -> list[list[Shard]]:
        """_create_fp16_sub_groups."""
        limit = self.zero["sub_group_size"]
        if not group or limit >= sum(shard.share for shard in group):
            return [group] if group else []
        found: list[list[Shard]] = [[]]
        for shard in group:
            if sum(other.share for other in found[-1]) >= limit:
                found.append([])
            found[-1].append(shard)
        return found

    def initialise(self, ledger: Ledger) -> None:
        self._build(ledger)
        self._flatten(ledger)
        self._master_weights(ledger)
        self._gradient_buffers(ledger)
        for shard in self.shards:  # create_reduce_and_remove_grad_hooks
            self.coordinator.gather_now(ledger, [shard])
            self.coordinator.take_apart(ledger, [shard])

    def _build(self, ledger: Ledger) -> None:
        """zero.Init: made in float32, converted, and cut once its module is made; then filled."""
        place, category = self._share_home(), "parameters"
        made = dict(self.coordinator.modules)  # a tied head is made with a weight of its own
        for module in made.values():
            for shard in module:
                ledger.allocate("transient", self.element * shard.size)
                temporary(ledger, 4 * shard.size if self.element != 4 else 0)
            for shard in module:
                self._allocate(ledger, category, self.element * shard.share, place, self._pins())
                ledger.free("transient", self.element * shard.size)
        for shard in self.shards:
            self.coordinator.gather_now(ledger, [shard])
            self.coordinator.take_apart(ledger, [shard])
        if "head.weight" not in self.by_name:  # held by cycles until deepspeed.initialize collects
            share = self.element * self.by_name["token_embedding.weight"].share
            self._free(ledger, category, share, place, self._pins())

    def _flatten(self, ledger: Ledger) -> None:
        """_create_fp16_partitions_with_defragmentation: all shares in one buffer.

        It is filled on the host and, where it belongs there, moved to the device.
        """
        place = self._share_home()
        total = self.element * sum(shard.share for shard in self.shards)
        if place == "host":
            self._flatten_on_host(ledger)
        else:
            ledger.allocate("transient", total, "host")
        for shard in self.shards:
            self._free(ledger, "parameters", self.element * shard.share, place, self._pins())
        if place == "gpu":
            if len(ledger.places) == 2:
                ledger.allocate("parameters", total)
                ledger.free("transient", total, "host")
            else:
                ledger.move("transient", "parameters", total)

    def _flatten_on_host(self, ledger: Ledger) -> None:
        """_create_param_groups_fp16_flat_cpu_memory, page-locked whatever pin_memory says."""
        for decays in (True, False):
            size = self.element * sum(s.share for s in self.shards if s.parameter.decays == decays)
            self._allocate(ledger, "parameters", size, "host", self.setup.device != "cpu")

    def _share_home(self) -> Place:
        return "gpu" if offload_device(self.zero, "offload_param") == "none" else "host"

    def _pins(self) -> bool:
        """Whether each parameter's share is page-locked while the model is built."""
        options = {**PARAMETER_OFFLOAD_DEFAULTS, **(self.zero.get("offload_param") or {})}
        return self._share_home() == "host" and options["pin_memory"] and self.setup.device != "cpu"

    def _master_weights(self, ledger: Ledger) -> None:
        """_create_fp32_partitions and initialize_optimizer_states.

        In float32, too, the master weights are a copy. A conversion is copied once more, and lives
        until the next one.
        """
        previous: tuple[int, Place] = 0, self.home
        for index, size in enumerate(self._group_sizes()):
            place = self._home_of(index)
            converted = self.master * size if self._is_converted(place) else 0
            ledger.allocate("transient", converted, place)
            ledger.free("transient", *previous)
            previous = converted, place
            ledger.allocate("master_weights", self.master * size, place)
        ledger.free("transient", *previous)
        largest = self.master * max(self._group_sizes())
        ledger.allocate("transient", largest, self.home)
        if self.offloads:
            for index, size in enumerate(self._group_sizes()):
                place = self._home_of(index)
                pins = self.pins and place == "host"
                self._allocate(ledger, "gradients", self.master * size, place, pins)
        ledger.free("transient", largest, self.home)

    def _is_converted(self, place: Place) -> bool:
        return self.master != self.element or (
            self.setup.device != "cpu" and place != self._share_home()
        )

    def _gradient_buffers(self, ledger: Ledger) -> None:
        """_setup_for_real_optimizer: the reduction's bucket, and the sums of all gradients."""
        if self.zero["contiguous_gradients"]:
            ledger.allocate("buffers", self.reduced * self.zero["reduce_bucket_size"])
        size = self.sums * sum(shard.share for shard in self.shards)
        self._allocate(ledger, "gradients", size, self.home, self.pins)

    def _group_sizes(self) -> list[int]:
        return [sum(shard.share for shard in group) for group in self.sub_groups]

    def _home_of(self, index: int) -> Place:
        """offload_optimizer.ratio leaves the first sub-groups on the device."""
        return "gpu" if index < self.on_device else self.home

    def enter(self, ledger: Ledger, module: str) -> None:
        if self.forward_is_next:
            self.forward_is_next = False
            self.coordinator.reset_step(ledger)
        if module in self.coordinator.modules:
            self.coordinator.enter(ledger, module, backward=False)

    def leave(self, ledger: Ledger, module: str) -> None:
        if module in self.coordinator.modules:
            self.coordinator.leave(ledger, module, backward=False)

    def enter_backward(self, ledger: Ledger, module: str) -> None:
        if module in self.coordinator.modules:
            self.coordinator.enter(ledger, module, backward=True)

    def leave_backward(self, ledger: Ledger, module: str) -> None:
        """DeepSpeed does not see an embedding's backward end: its input has no gradient."""
        if module in self.coordinator.modules and not module.endswith("_embedding"):
            self.coordinator.leave(ledger, module, backward=True)

    def gradient(self, ledger: Ledger, parameter: Parameter) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads."""
        shard, limit = self.by_name[parameter.name], self.zero["reduce_bucket_size"]
        self.coordinator.drop_aliases(ledger, parameter.name.rpartition(".")[0])
        filled = sum(other.size for other in self.bucket)
        if self.bucket and filled + shard.size > limit:
            self._reduce(ledger)
            filled = 0
        if self.zero["contiguous_gradients"] and filled + shard.size <= limit:
            ledger.free("gradients", self.element * shard.size)
        else:
            self.own_gradients.add(shard)
        self.bucket.append(shard)

    def _reduce(self, ledger: Ledger) -> None:
        """__reduce_and_partition_ipg_grads: add the bucket's gradients up over ranks, keep shares.

        Its gradients are joined once more on the way, rank by rank, in a second bucket.
        """
        if not self.bucket:
            return
        filled = sum(shard.size for shard in self.bucket)
        shares = sum(shard.share for shard in self.bucket)
        padded = sum(shard.padded for shard in self.bucket)
        whole_buffer = (
            self.zero["contiguous_gradients"] and filled <= self.zero["reduce_bucket_size"]
        )
        kept = 0
        if whole_buffer and not self.zero["reduce_scatter"]:  # __avg_scatter_contiguous_grads
            if self.setup.data_ranks > 1:
                kept = self.reduced * filled
                ledger.allocate("transient", kept)
            summed = self.sums * filled
            kept += self.sums * sum(s.share for s in self.bucket if s.padded != s.size)
        else:  # __avg_scatter_grads
            converted = self.reduced * filled if self.reduced != self.element else 0
            ledger.allocate("transient", converted)
            if len(self.bucket) > 1 or padded != filled:
                kept = self.reduced * padded
                ledger.allocate("transient", kept)
            temporary(ledger, self.reduced * padded if self.setup.device == "cpu" else 0)
            ledger.free("transient", converted)
            summed = self.sums * shares
        if self.reduced != self.sums:
            ledger.allocate("transient", summed)
            ledger.free("transient", kept)
            kept = summed
        for shard in sorted(self.bucket, key=self.shards.index):
            self._keep_share(ledger, shard)
        ledger.free("transient", kept)
        self.bucket.clear()

    def _keep_share(self, ledger: Ledger, shard: Shard) -> None:
        """partition_grads, and _offload_grad_partition_at_boundary with the optimizer offloaded."""
        staged = self.sums * shard.share if self.home == "host" and len(ledger.places) == 2 else 0
        ledger.allocate("transient", staged)
        # Of many micro-batches a replay may leave out those between the second and the last.
        last = self.micro_batch >= min(2, self.setup.accumulation_steps - 1)
        if self.offloads and last:
            temporary(ledger, NORM_ELEMENT * min(shard.share, NORM_CHUNK))
            temporary(ledger, self.master * shard.share if self.master != self.sums else 0)
        ledger.free("transient", staged)
        if shard in self.own_gradients:
            self.own_gradients.discard(shard)
            ledger.free("gradients", self.element * shard.size)

    def end_micro_batch(self, ledger: Ledger, number: int) -> None:
        """independent_gradient_partition_epilogue, then backward_epilogue."""
        self._reduce(ledger)
        self.coordinator.end_backward(ledger)
        self.micro_batch = number + 1
        self.forward_is_next = True

    def step(self, ledger: Ledger, *, first: bool) -> None:
        """DeepSpeedZeroOptimizer_Stage3.step, one sub-group after the other."""
        self.micro_batch = 0
        self.coordinator.release_all(ledger)
        if not self.offloads:  # get_grad_norm_direct
            for shard in self.shards:
                temporary(ledger, NORM_ELEMENT * shard.share)
        for index, size in enumerate(self._group_sizes()):
            gradient = self._join_gradients(ledger, index, size)
            if first:
                self._optimizer_states(ledger, index, size)
            ledger.free("transient", gradient)
        self.coordinator.gather_now(ledger, [shard for shard in self.shards if shard.persists])

    def _join_gradients(self, ledger: Ledger, index: int, size: int) -> int:
        """_prepare_fp32_grad_for_sub_group: one parameter's gradient alone needs no joining."""
        if self.offloads:
            return 0
        joined = self.sums * size if len(self.sub_groups[index]) > 1 else 0
        ledger.allocate("transient", joined)
        if self.sums == self.master:
            return joined
        ledger.allocate("transient", self.master * size)
        ledger.free("transient", joined)
        return self.master * size

    def _optimizer_states(self, ledger: Ledger, index: int, size: int) -> None:
        """AdamW's two moments."""
        ledger.allocate("optimizer_states", 2 * self.master * size, self._home_of(index))

    def _allocate(
        self, ledger: Ledger, category: Category, size: int, place: Place, pinned: bool
    ) -> None:
        """Page-locked memory is a copy of what was allocated first."""
        if pinned:
            ledger.allocate("transient", size, place)
        ledger.allocate(category, pinned_size(size) if pinned else size, place)
        if pinned:
            ledger.free("transient", size, place)

    def _free(
        self, ledger: Ledger, category: Category, size: int, place: Place, pinned: bool
    ) -> None:
        ledger.free(category, pinned_size(size) if pinned else size, place)


def temporary(ledger: Ledger, size: int, place: Place = "gpu") -> None:
    """Allocated and soon released."""
    ledger.allocate("transient", size, place)
    ledger.free("transient", size, place)


def pinned_size(size: int) -> int:
    """torch's allocator of page-locked memory rounds up to a power of two (read)."""
    return 1 << (size - 1).bit_length() if size else 0


def shard_of(parameter: Parameter, ranks: int) -> Shard:
    share = -(-parameter.size // ranks)
    return Shard(parameter, share, share * ranks)


def zero_options(section: Mapping[str, Any]) -> dict[str, Any]:
    """The zero_optimization block by its fields' names, with the defaults."""
    given = {
        key.removeprefix("stage3_"): value for key, value in section["zero_optimization"].items()
    }
    options = {**ZERO_DEFAULTS, **given}
    if options["allgather_sequential"]:  # DeepSpeedEngine._configure_zero_optimizer
        options["prefetch_bucket_size"] = 1
    return options


def offload_device(zero: Mapping[str, Any], key: str) -> str:
    return str((zero.get(key) or {}).get("device", "none"))


def containers(module: str) -> list[str]:
    """The modules around one, outermost first: "" is the model; a list of blocks is never called.

    >>> containers("blocks.3.attention.qkv")
    ['', 'blocks.3', 'blocks.3.attention']
    """
    parts = module.split(".")[:-1]
    found = [".".join(parts[: length + 1]) for length in range(len(parts))]
    return ["", *(name for name in found if name != "blocks")]
