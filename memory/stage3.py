"""States of ZeRO stage 3: parameters, gradients, master weights and optimizer states are all cut.

DeepSpeedZeroOptimizer_Stage3 (runtime/zero/stage3.py) on parameters made under zero.Init; a
method's docstring begins with the name of its counterpart there. Shares are padded, so all ranks
hold the same.

Measured on a CPU, where gloo copies what it gathers or scatters; NCCL does not. Read, not measured:
fp16, streams, offload to a host other than the device (its page-locked memory and the copies on the
way), offload_optimizer.ratio, and NVMe. Left out: quantized weights and gradients,
zero_hpz_partition_size, use_all_reduce_for_fetch_params, module_granularity_threshold and leaf
modules, ZenFlow, SuperOffload.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from memory.coordinator import Coordinator, Shard, offload_device, shard_of
from memory.ledger import Category, Ledger, Place
from memory.states import FLOAT32, Parameter, Setup, States, borrow, borrowed, update

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
NORM_ELEMENT = 8
"""Norms are summed up in float64 (get_norm_dtype in runtime/zero/utils.py)."""
NORM_ELEMENTS = 250_000_000
"""At once (_constant_buffered_norm2)."""
SMALLEST_SWAPPED = 1024**2
"""Bytes of a tensor that goes to NVMe (MIN_AIO_BYTES in runtime/swap_tensor/utils.py)."""


class Stage3States(States):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.zero = zero_options(setup.zero)
        self.element, self.master = setup.element, setup.master_element
        self.sums, self.sent = setup.accumulation_element, setup.communication_element
        self.shards = [shard_of(parameter, setup.data_ranks) for parameter in setup.parameters]
        self.by_name = {shard.parameter.name: shard for shard in self.shards}
        self._mark_persistent()
        self.coordinator = Coordinator(self.shards, self.zero, setup)
        self.groups = [*self._sub_groups(decays=True), *self._sub_groups(decays=False)]
        self.group_sizes = [sum(shard.share for shard in group) for group in self.groups]

        self.device_is_host = setup.device == "cpu"
        self.offloads = setup.offloads_optimizer
        self.home: Place = "host" if self.offloads else "gpu"
        """Of gradients; of master weights and optimizer states, too, but for a ratio's."""
        optimizer = {**OPTIMIZER_OFFLOAD_DEFAULTS, **(self.zero.get("offload_optimizer") or {})}
        self.pins = self.offloads and optimizer["pin_memory"] and not self.device_is_host
        self.on_device = int((1 - optimizer["ratio"]) * len(self.groups)) if self.offloads else 0
        """Sub-groups that offload_optimizer.ratio leaves there, the first ones."""
        self.swap_buffers = optimizer["buffer_count"]
        self.swaps = offload_device(self.zero, "offload_optimizer") == "nvme"

        parameters = {**PARAMETER_OFFLOAD_DEFAULTS, **(self.zero.get("offload_param") or {})}
        device = offload_device(self.zero, "offload_param")
        self.shares_home: Place = "gpu" if device == "none" else "host"
        self.pins_shares = device != "none" and parameters["pin_memory"] and not self.device_is_host
        self.swaps_shares = device == "nvme"
        self.parameter_offload = parameters

        self.bucket: list[Shard] = []
        self.own_gradients: set[Shard] = set()
        """Of the bucket's list, those that are not in its buffer."""
        self.micro_batch = 0
        self.forward_is_next = True

    def _mark_persistent(self) -> None:
        """DeepSpeedZeRoOffload.mark_persistent_parameters."""
        total = 0
        for shard in self.shards:
            fits = total + shard.size <= self.zero["model_persistence_threshold"]
            if fits and shard.size <= self.zero["param_persistence_threshold"]:
                shard.persists = True
                total += shard.size

    def _sub_groups(self, *, decays: bool) -> list[list[Shard]]:
        """_create_fp16_sub_groups: each is closed by the parameter that fills it."""
        limit = self.zero["sub_group_size"]
        found: list[list[Shard]] = []
        for shard in self.shards:
            if shard.parameter.decays != decays:
                continue
            if not found or sum(other.share for other in found[-1]) >= limit:
                found.append([])
            found[-1].append(shard)
        return found

    def initialise(self, ledger: Ledger) -> None:
        self._build(ledger)
        self._flatten(ledger)
        self._make_master_weights(ledger)
        self._make_gradients(ledger)
        for shard in self.shards:  # create_reduce_and_remove_grad_hooks
            self.coordinator.gather_now(ledger, [shard])
            self.coordinator.take_apart(ledger, [shard])

    def _build(self, ledger: Ledger) -> None:
        """zero.Init cuts a module's parameters once it is made, in float32 and then converted.

        Then each is gathered and filled. A tied head is made with a weight of its own, which cycles
        of references hold until deepspeed.initialize collects them.
        """
        if self.swaps_shares:
            options = self.parameter_offload
            size = self.element * options["buffer_count"] * options["buffer_size"]
            ledger.allocate("parameters", size, "host")
        for module in self.coordinator.modules.values():
            for shard in module:
                ledger.allocate("transient", self.element * shard.size)
                borrow(ledger, FLOAT32 * shard.size if self.element != FLOAT32 else 0)
            for shard in module:
                self._allocate_share(ledger, shard)
                ledger.free("transient", self.element * shard.size)
        for shard in self.shards:
            self.coordinator.gather_now(ledger, [shard])
            self.coordinator.take_apart(ledger, [shard])
        if "head.weight" not in self.by_name:
            self._free_share(ledger, self.by_name["token_embedding.weight"])

    def _allocate_share(self, ledger: Ledger, shard: Shard) -> None:
        if not self._is_swapped(shard):
            self._allocate(
                ledger, "parameters", self.element * shard.share, self.shares_home, self.pins_shares
            )

    def _free_share(self, ledger: Ledger, shard: Shard) -> None:
        if not self._is_swapped(shard):
            size = self.element * shard.share
            if self.pins_shares:
                ledger.unlock("parameters", size)
            else:
                ledger.free("parameters", size, self.shares_home)

    def _is_swapped(self, shard: Shard) -> bool:
        return self.swaps_shares and self.element * shard.share >= SMALLEST_SWAPPED

    def _flatten(self, ledger: Ledger) -> None:
        """_create_fp16_partitions_with_defragmentation: one buffer, filled on the host.

        Where shares stay on the host, one for each optimizer group, page-locked whatever pin_memory
        says; with NVMe no more than max_in_cpu elements, and room to convert a sub-group.
        """
        sizes = [
            sum(s.share for s in self.shards if s.parameter.decays == d) for d in (True, False)
        ]
        if self.shares_home == "gpu":
            total = self.element * sum(sizes)
            ledger.allocate("transient", total, "host")
            for shard in self.shards:
                self._free_share(ledger, shard)
            with borrowed(ledger, 0 if self.device_is_host else total):
                ledger.free("transient", total, "host")
            ledger.allocate("parameters", total)
            return
        room = self.parameter_offload["max_in_cpu"] if self.swaps_shares else sum(sizes)
        if room < sum(sizes):
            self._allocate(
                ledger, "parameters", self.element * max(self.group_sizes), "host", pinned=False
            )
        for size in sizes:
            kept = min(size, room)
            room -= kept
            pinned = not self.device_is_host
            self._allocate(ledger, "parameters", self.element * kept, "host", pinned)
        for shard in self.shards:
            self._free_share(ledger, shard)

    def _make_master_weights(self, ledger: Ledger) -> None:
        """_create_fp32_partitions and initialize_optimizer_states.

        In float32, too, the master weights are a copy. Where the weights are converted, what they
        were converted to is copied once more, and lives until the next sub-group's is there.
        Offloaded sub-groups have gradients of their own.
        """
        if self.swaps:
            size = self.master * self.swap_buffers * max(self.group_sizes)
            ledger.allocate("buffers", size, "host")
        previous: tuple[int, Place] = 0, "gpu"
        for index, size in enumerate(self.group_sizes):
            if self._group_is_swapped(index):
                continue
            place = self._home_of(index)
            moved = place != self.shares_home and not self.device_is_host
            converted = self.master * size if self.master != self.element or moved else 0
            ledger.allocate("transient", converted, place)
            ledger.free("transient", *previous)
            previous = converted, place
            ledger.allocate("master_weights", self.master * size, place)
        ledger.free("transient", *previous)
        with borrowed(ledger, self.master * max(self.group_sizes), self.home):
            for index, size in enumerate(self.group_sizes):
                if self.offloads and not self._group_is_swapped(index):
                    place = self._home_of(index)
                    pinned = self.pins and place == "host"
                    self._allocate(ledger, "gradients", self.master * size, place, pinned)

    def _group_is_swapped(self, index: int) -> bool:
        return self.swaps and self.master * self.group_sizes[index] >= SMALLEST_SWAPPED

    def _home_of(self, index: int) -> Place:
        return "gpu" if index < self.on_device else self.home

    def _make_gradients(self, ledger: Ledger) -> None:
        """_setup_for_real_optimizer: the reduction's bucket, and the sums of the gradients."""
        if self.zero["contiguous_gradients"]:
            ledger.allocate("buffers", self.sent * int(self.zero["reduce_bucket_size"]))
        size = self.sums * sum(self.group_sizes)
        self._allocate(ledger, "gradients", size, self.home, self.pins)

    def enter(self, ledger: Ledger, module: str) -> None:
        """pre_sub_module_forward_function; the model's first module begins a forward."""
        if self.forward_is_next:
            self.forward_is_next = False
            self.coordinator.reset_step(ledger)
        if module in self.coordinator.modules:
            self.coordinator.enter(ledger, module, backward=False)

    def leave(self, ledger: Ledger, module: str) -> None:
        """post_sub_module_forward_function."""
        if module in self.coordinator.modules:
            self.coordinator.leave(ledger, module, backward=False)

    def enter_backward(self, ledger: Ledger, module: str) -> None:
        """pre_sub_module_backward_function."""
        if module in self.coordinator.modules:
            self.coordinator.enter(ledger, module, backward=True)

    def leave_backward(self, ledger: Ledger, module: str) -> None:
        """post_sub_module_backward_function, never called of an embedding: tokens need no gradient.

        What it gathered stays until the micro-batch ends.
        """
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
        """__reduce_and_partition_ipg_grads: add the bucket up over the ranks, and keep shares."""
        if not self.bucket:
            return
        in_buffer = self.zero["contiguous_gradients"] and not self.own_gradients
        if in_buffer and not self.zero["reduce_scatter"]:
            shares = self._all_reduce(ledger)
        else:
            shares = self._reduce_scatter(ledger)
        for shard in self.bucket:
            self._keep_share(ledger, shard)
        ledger.free("transient", shares)
        self.bucket.clear()

    def _all_reduce(self, ledger: Ledger) -> int:
        """__avg_scatter_contiguous_grads: in place, then divided into a copy."""
        filled = sum(shard.size for shard in self.bucket)
        copy = self.sent * filled if self.setup.data_ranks > 1 else 0
        ledger.allocate("transient", copy)
        if self.sent != self.sums:
            ledger.allocate("transient", self.sums * filled)
            ledger.free("transient", copy)
            copy = self.sums * filled
        padded = self.sums * sum(s.share for s in self.bucket if s.padded != s.size)
        ledger.allocate("transient", padded)
        return copy + padded

    def _reduce_scatter(self, ledger: Ledger) -> int:
        """__avg_scatter_grads: the gradients are joined rank by rank, in a second bucket."""
        padded = sum(shard.padded for shard in self.bucket)
        filled = sum(shard.size for shard in self.bucket)
        converted = self.sent * filled if self.sent != self.element else 0
        ledger.allocate("transient", converted)
        joined = self.sent * padded if len(self.bucket) > 1 or padded != filled else 0
        ledger.allocate("transient", joined)
        borrow(ledger, self.sent * padded if self.device_is_host else 0)  # gloo's copy
        ledger.free("transient", converted)
        if self.sent == self.sums:
            return joined
        shares = self.sums * sum(shard.share for shard in self.bucket)
        ledger.allocate("transient", shares)
        ledger.free("transient", joined)
        return shares

    def _keep_share(self, ledger: Ledger, shard: Shard) -> None:
        """partition_grads, and at the last micro-batch _offload_grad_partition_at_boundary.

        Sums on the host are brought to the device to be added to, where the one before may linger.
        """
        is_moved = self.home == "host" and not self.device_is_host
        copies = (2 if self.micro_batch else 1) if is_moved else 0
        # Of many micro-batches a replay may leave out those between the second and the last.
        is_last = self.micro_batch >= min(2, self.setup.accumulation_steps - 1)
        with borrowed(ledger, copies * self.sums * shard.share):
            if self.offloads and is_last:
                borrow(ledger, NORM_ELEMENT * min(shard.share, NORM_ELEMENTS))
                borrow(ledger, self.master * shard.share if self.master != self.sums else 0)
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
        """step: one sub-group after the other, then persistent parameters are gathered."""
        self.micro_batch = 0
        self.coordinator.release_all(ledger)
        if self.setup.section.get("fp16", {}).get("enabled"):  # has_overflow: abs() == inf
            borrow(ledger, (self.sums + 1) * sum(self.group_sizes), self.home)
        for shard in () if self.offloads else self.shards:  # get_grad_norm_direct
            borrow(ledger, NORM_ELEMENT * shard.share)
        for index in range(len(self.groups)):
            gradient = self._join_gradients(ledger, index)
            self._update(ledger, index, first=first)
            ledger.free("transient", gradient)
        self.coordinator.gather_now(ledger, [shard for shard in self.shards if shard.persists])

    def _join_gradients(self, ledger: Ledger, index: int) -> int:
        """_prepare_fp32_grad_for_sub_group: one parameter's gradient alone needs no joining."""
        if self.offloads:
            return 0
        size = self.group_sizes[index]
        joined = self.sums * size if len(self.groups[index]) > 1 else 0
        ledger.allocate("transient", joined)
        if self.sums == self.master:
            return joined
        ledger.allocate("transient", self.master * size)
        ledger.free("transient", joined)
        return self.master * size

    def _update(self, ledger: Ledger, index: int, *, first: bool) -> None:
        """_optimizer_step and _reassign_or_swap_out_partitioned_parameters.

        A ratio's sub-groups on the device are updated by torch's AdamW, on a GPU its foreach
        kernel. Weights that go to the device in another type are converted on the host.
        """
        size, place = self.group_sizes[index], self._home_of(index)
        if self._group_is_swapped(index):
            return
        if place != self.home:
            if first:
                ledger.allocate("optimizer_states", 2 * self.master * size, place)
            borrow(ledger, self.master * size)
            return
        update(ledger, self.setup, [[size]], self.master, first=first)
        goes_to_device = place == "host" and self.shares_home == "gpu" and not self.device_is_host
        if goes_to_device and self.master != self.element:
            borrow(ledger, self.element * size, "host")

    def _allocate(
        self, ledger: Ledger, category: Category, size: int, place: Place, pinned: bool
    ) -> None:
        if pinned:
            ledger.lock(category, size)
        else:
            ledger.allocate(category, size, place)


def zero_options(block: Mapping[str, Any]) -> dict[str, Any]:
    """The zero_optimization block by its fields' names, with the defaults."""
    options = ZERO_DEFAULTS | {key.removeprefix("stage3_"): value for key, value in block.items()}
    if options["allgather_sequential"]:  # DeepSpeedEngine._configure_zero_optimizer
        options["prefetch_bucket_size"] = 1
    return options
