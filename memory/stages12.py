"""States of ZeRO stages 1 and 2: optimizer states, and at stage 2 gradients, partitioned.

DeepSpeedZeroOptimizer (runtime/zero/stage_1_and_2.py); a method's docstring begins with the name of
its counterpart there. On a GPU the second bucket of overlap_comm, pinned memory and fp16 were read,
not measured. Left out: parameter_alignment, a few elements a parameter.
"""

from __future__ import annotations

from memory.ledger import Category, Ledger
from memory.states import (
    FLOAT32,
    Group,
    Parameter,
    Setup,
    States,
    borrow,
    borrowed,
    buckets,
    flatten_weights,
    gather_weights,
    replace,
    update,
)

FLOAT64 = 8
"""Gradient norms are taken in it (get_norm_dtype in runtime/zero/utils.py)."""


class ZeroStates(States):
    """Without offload; what differs with it is in OffloadedStates."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        zero = setup.zero
        self.groups = setup.groups
        self.sizes = {parameter.name: parameter.size for parameter in setup.parameters}
        self.group_of = {p.name: group for group in self.groups for p in group.parameters}
        self.own = {name: size for group in self.groups for name, size in group.own_pieces.items()}
        """Elements of each parameter in this rank's shares."""
        self.partitions = setup.stage == 2
        self.overlaps = bool(zero.get("overlap_comm"))
        self.contiguous = zero.get("contiguous_gradients", True)
        self.bucket_size = int(zero["reduce_bucket_size"])
        self.master = setup.master_element
        # _use_compact_grad_partition_buffer: this rank's share is summed up in float32.
        self.compact = setup.accumulation_element == FLOAT32 != setup.element
        # use_grad_accum_attribute: at stage 1 so is every whole gradient.
        self.widens = self.compact and not self.partitions
        self.gradient_element = FLOAT32 if self.widens else setup.element

        self.micro_batch = 0
        self.ready = False
        """Whether there are buckets for gradients to go to."""
        self.bucket: list[Parameter] = []
        """Whose gradients wait to be reduced."""
        self.bucket_bytes: list[int] = []
        self.separate: dict[str, int] = {}
        """Bytes of each gradient that has a tensor of its own."""
        self.late: list[str] = []
        """Gradients that are released at the next reduction (previous_reduced_grads)."""
        self.reduced = 0
        """Bytes of grads_in_partition, to which reduced gradients of this rank are copied."""
        self.averaged: dict[str, int] = {}
        """Bytes of the tensors in which reduced gradients are summed up, by parameter."""
        self.averaged_buffer = 0
        """Bytes of the first micro-batch's grads_in_partition, which took their place."""
        self.shares: list[Group] = []
        """Those of which the float32 sum of this rank's share exists."""

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is the last of its step."""
        return self.micro_batch + 1 == self.setup.accumulation_steps

    def initialise(self, ledger: Ledger) -> None:
        """__init__ and initialize_optimizer_states."""
        for parameter in self.setup.parameters:
            ledger.allocate("parameters", parameter.size * self.setup.element)
        for group in self.groups:
            flatten_weights(ledger, group, self.setup.element, self.setup.device_memory)
            self._copy_share(ledger, group)
        borrow(ledger, sum(group.share for group in self.groups) * self.master)  # gradients

    def _copy_share(self, ledger: Ledger, group: Group) -> None:
        """The clone of the share is the master copy, unless that is wider."""
        with borrowed(ledger, group.share * self.setup.element if self.master_is_wider else 0):
            ledger.allocate("master_weights", group.share * self.master)

    @property
    def master_is_wider(self) -> bool:
        return self.master != self.setup.element

    def gradient(self, ledger: Ledger, parameter: Parameter) -> None:
        """process_gradients, a hook that is not set where it would have nothing to do."""
        if self.contiguous or self.partitions or self.overlaps or self.widens:
            self._make_buckets(ledger)
        name, size = parameter.name, parameter.size * self.setup.element
        if name in self.separate:  # added to that of the earlier micro-batches
            if self.widens:
                borrow(ledger, parameter.size * FLOAT32)
            ledger.free("gradients", size)
        elif self.widens:
            self.separate[name] = parameter.size * FLOAT32
            replace(ledger, "gradients", [size], self.separate[name])
        else:
            self.separate[name] = size
        if self.partitions or (self.overlaps and self.boundary):
            self._fill_bucket(ledger, parameter)

    def _make_buckets(self, ledger: Ledger) -> None:
        """setup_buckets, before the first gradient after a reduction."""
        if self.contiguous and not self.ready:
            size = self.bucket_size * self.gradient_element
            self.bucket_bytes = [size, size] if self.overlaps else [size]
            for size in self.bucket_bytes:
                ledger.allocate("buffers", size)
        self.ready = True

    def _fill_bucket(self, ledger: Ledger, parameter: Parameter) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads."""
        if sum(member.size for member in self.bucket) + parameter.size > self.bucket_size:
            self._reduce(ledger)
        if self.contiguous and parameter.size <= self.bucket_size:
            self._release(ledger, parameter.name)
        self.bucket.append(parameter)

    def _release(self, ledger: Ledger, name: str) -> None:
        """A gradient that is in a bucket has no memory of its own."""
        ledger.free("gradients", self.separate.pop(name, 0))

    def _reduce(self, ledger: Ledger) -> None:
        """reduce_ipg_grads."""
        if not self.contiguous:
            self._release_late(ledger)
        self._average(ledger)
        for parameter in self.bucket:
            if parameter.name in self.own:
                if self.contiguous:
                    self._take(ledger, parameter)
            elif self.partitions and self.overlaps and not self.contiguous:
                self.late.append(parameter.name)
            elif self.partitions:
                self._release(ledger, parameter.name)
        self.bucket.clear()

    def _average(self, ledger: Ledger) -> None:
        """average_tensor; without contiguous_gradients, buffered_reduce_fallback."""
        if self.compact:
            for parameter in self.bucket:
                if parameter.name in self.own:
                    self._make_share(ledger, self.group_of[parameter.name])
        element, communication = self.gradient_element, self.setup.communication_element
        widened = [self.own.get(p.name, 0) * FLOAT32 for p in self.bucket if self.compact]
        for sizes in self._messages():
            flat = sum(sizes) * element if len(sizes) > 1 else 0
            sent = sum(sizes) * communication if communication != element else 0
            with borrowed(ledger, sent or flat):
                borrow(ledger, flat if sent else 0)
                borrow(ledger, max(widened, default=0) if communication != FLOAT32 else 0)

    def _messages(self) -> list[list[int]]:
        """Elements of the tensors of each all-reduce: several are copied into one, one is not."""
        sizes = [parameter.size for parameter in self.bucket]
        if not self.contiguous:
            return [sizes]
        if not self.setup.zero.get("reduce_scatter", True):
            return [[sum(sizes)]]
        slices: list[tuple[int, int]] = []  # a rank, and what of the bucket it will own
        for parameter in self.bucket:
            pieces = self.group_of[parameter.name].pieces[parameter.name]
            for rank, size in pieces.items():
                added = self.compact and rank == self.setup.data_rank  # each to a place of its own
                if slices and slices[-1][0] == rank and not added:
                    size += slices.pop()[1]
                slices.append((rank, size))
        if self.setup.zero.get("use_multi_rank_bucket_allreduce", True):
            return list(buckets([size for _, size in slices], self.bucket_size))
        ranks = sorted({rank for rank, _ in slices})
        return [[size for rank, size in slices if rank == owner] for owner in ranks]

    def _make_share(self, ledger: Ledger, group: Group) -> None:
        """_build_compact_grad_partition_buffer."""
        if group not in self.shares:
            self.shares.append(group)
            ledger.allocate("gradients", group.share * FLOAT32)

    def _take(self, ledger: Ledger, parameter: Parameter) -> None:
        """copy_grads_in_partition: a reduced gradient of this rank's leaves the bucket."""
        if self.compact and self.partitions:
            return  # it is in the sum, and released with all others
        if not self.compact and not self.reduced:
            self.reduced = sum(self.sizes[name] for name in self.own) * self.setup.element
            ledger.allocate("gradients", self.reduced)
        self._release(ledger, parameter.name)

    def end_micro_batch(self, ledger: Ledger, number: int) -> None:
        """At stage 1 gradients are reduced at the boundary only (reduce_gradients)."""
        if self.partitions or self.boundary:
            if not self.partitions and not self.overlaps:
                for parameter in sorted(self.setup.parameters, key=lambda p: not p.decays):
                    self._fill_bucket(ledger, parameter)
            self._end_reduction(ledger)
        self.micro_batch = (number + 1) % self.setup.accumulation_steps

    def _end_reduction(self, ledger: Ledger) -> None:
        """independent_gradient_partition_epilogue."""
        self._reduce(ledger)
        self._release_late(ledger)
        self._sum_up(ledger)
        self.ready = False
        # At stage 1, other ranks' wide gradients and the buckets they are in outlast the update.
        if not (self.widens and self.sizes.keys() - self.own.keys()):
            self._release_all(ledger)

    def _release_late(self, ledger: Ledger) -> None:
        """_clear_previous_reduced_grads."""
        for name in self.late:
            self._release(ledger, name)
        self.late.clear()

    def _sum_up(self, ledger: Ledger) -> None:
        """The first micro-batch's reduced gradients are the sum to which the others are added."""
        if self.compact:
            for group in self.groups if self.boundary else []:
                self._make_share(ledger, group)
            return
        new = {name: self.separate.pop(name) for name in self.own if name in self.separate}
        if self.averaged or self.averaged_buffer:
            for size in (*new.values(), self.reduced):
                ledger.free("gradients", size)
        else:
            self.averaged, self.averaged_buffer = new, self.reduced
        self.reduced = 0
        if self.boundary:  # get_flat_partition pads the share
            for group in self.groups:
                ledger.allocate("gradients", group.padding * self.setup.element)

    def _release_all(self, ledger: Ledger) -> None:
        for size in self.bucket_bytes:
            ledger.free("buffers", size)
        self.bucket_bytes = []
        for name in list(self.separate):
            self._release(ledger, name)

    def step(self, ledger: Ledger, *, first: bool) -> None:
        """step, and DeepSpeedEngine._take_model_step."""
        if self.setup.zero.get("compute_grad_norm", True):
            for piece in self.own.values():  # get_grad_norm_direct
                borrow(ledger, piece * FLOAT64)
        for group in self.groups:
            gradient = self._flatten_gradients(ledger, group)
            update(ledger, self.setup, [[group.share]], self.master, first=first)
            for size in gradient:
                ledger.free("gradients", size)
        gather_weights(ledger, self.setup, self.groups)
        self._release_all(ledger)
        self.shares.clear()

    def _flatten_gradients(self, ledger: Ledger, group: Group) -> list[int]:
        """The share's gradient in one tensor of the master weights' type; bytes of its tensors."""
        averaged = [self.averaged.pop(name) for name in group.own_pieces if name in self.averaged]
        averaged.append(group.padding * self.setup.element)
        if group is self.groups[-1]:
            averaged.append(self.averaged_buffer)
            self.averaged_buffer = 0
        # Flattening a single tensor copies nothing.
        is_flat = self.compact or len(group.own_pieces) + bool(group.padding) == 1
        if self.compact:
            averaged = [group.share * FLOAT32]
        if is_flat and self.master == (FLOAT32 if self.compact else self.setup.element):
            return averaged
        flat = 0 if is_flat else group.share * self.setup.element
        with borrowed(ledger, flat if self.master_is_wider else 0):
            ledger.allocate("gradients", group.share * self.master)
        for size in averaged:
            ledger.free("gradients", size)
        return [group.share * self.master]


class OffloadedStates(ZeroStates):
    """Master weights, their gradients and optimizer states in host memory, with the update."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.contiguous = True
        self.moves = setup.device == "cuda"
        self.pins = self.moves and setup.zero["offload_optimizer"].get("pin_memory", True)
        self.reductions = 0
        """Since the last update, this one included (micro_step_id + 1)."""
        self.on_host: set[str] = set()
        """Parameters whose sum of gradients has a tensor on the host."""

    def initialise(self, ledger: Ledger) -> None:
        element = self.setup.element
        for parameter in self.setup.parameters:
            ledger.allocate("parameters", parameter.size * element)
        for group in self.groups:
            flatten_weights(ledger, group, element, self.setup.device_memory)
            self._copy_share(ledger, group)
            self._keep(ledger, "buffers", group.share * element)  # to send updated weights from
        largest = max(self.sizes.values()) * element
        self._keep(ledger, "buffers", largest)  # temp_grad_buffer_for_cpu_offload
        ledger.allocate("buffers", largest)  # temp_grad_buffer_for_gpu_offload
        for group in self.groups:
            self._keep(ledger, "gradients", group.share * self.master)

    def _copy_share(self, ledger: Ledger, group: Group) -> None:
        clone = group.share * self.setup.element if self.moves or self.master_is_wider else 0
        with borrowed(ledger, clone):
            self._keep(ledger, "master_weights", group.share * self.master)

    def _keep(self, ledger: Ledger, category: Category, size: int) -> None:
        if self.pins:
            ledger.lock(category, size)
        else:
            ledger.allocate(category, size, "host")

    def _make_buckets(self, ledger: Ledger) -> None:
        self.reductions += not self.ready
        super()._make_buckets(ledger)

    def _fill_bucket(self, ledger: Ledger, parameter: Parameter) -> None:
        super()._fill_bucket(ledger, parameter)
        if parameter.size > self.bucket_size:  # a clone takes its place
            borrow(ledger, self.separate[parameter.name])

    def _take(self, ledger: Ledger, parameter: Parameter) -> None:
        piece = self.own[parameter.name]
        adds = not self.compact and (self.reductions > 1 or not self.boundary)
        # async_accumulate_grad_in_cpu_via_gpu: whole, not only this rank's piece, and for good
        if adds and self.master == FLOAT32 and parameter.name not in self.on_host:
            self.on_host.add(parameter.name)
            self._keep(ledger, "gradients", parameter.size * self.setup.element)
        if self.boundary:
            borrow(ledger, piece * FLOAT64)  # set_norm_for_param_grad_in_gpu
            source = FLOAT32 if self.compact else self.setup.element
            borrow(ledger, piece * self.master if self.master != source else 0)
            self._release(ledger, parameter.name)

    def _sum_up(self, ledger: Ledger) -> None:
        """On the host, gradient by gradient."""

    def step(self, ledger: Ledger, *, first: bool) -> None:
        for group in self.groups:
            update(ledger, self.setup, [[group.share]], self.master, first=first)
            if group in self.shares:
                ledger.free("gradients", group.share * FLOAT32)
        gather_weights(ledger, self.setup, self.groups)
        self._release_all(ledger)
        self.shares.clear()
        self.reductions = 0
