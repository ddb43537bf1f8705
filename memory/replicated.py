"""States where every rank keeps all gradients until the update: stage 0, and bf16 at stage 1."""

from __future__ import annotations

from memory.ledger import Ledger
from memory.states import (
    FLOAT32,
    Parameter,
    Setup,
    States,
    all_reduce,
    borrow,
    borrowed,
    flatten_weights,
    gather_weights,
    replace,
    update,
)


class ReplicatedStates(States):
    """Gradients stay where autograd puts them, and further micro-batches are added in place."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.gradients: dict[str, int] = {}
        """Bytes, by parameter."""

    @property
    def sizes_by_group(self) -> list[list[int]]:
        return [[p.size for p in group.parameters] for group in self.setup.groups]

    def gradient(self, ledger: Ledger, parameter: Parameter) -> None:
        size = parameter.size * self.setup.element
        if parameter.name in self.gradients:
            ledger.free("gradients", size)
        else:
            self.gradients[parameter.name] = size

    def end_micro_batch(self, ledger: Ledger, number: int) -> None:
        """DeepSpeedEngine.buffered_allreduce_fallback, which this project calls off for one rank.

        training.engine.build_engine.
        """
        if number + 1 < self.setup.accumulation_steps or self.setup.data_ranks == 1:
            return
        sizes = [parameter.size for parameter in self.setup.parameters]
        all_reduce(ledger, sizes, self.setup.element, self.setup.communication_element)

    def release_gradients(self, ledger: Ledger) -> None:
        for size in self.gradients.values():
            ledger.free("gradients", size)
        self.gradients.clear()


class Float32States(ReplicatedStates):
    """The bare optimizer: there is nothing for DeepSpeed to wrap."""

    def initialise(self, ledger: Ledger) -> None:
        for parameter in self.setup.parameters:
            ledger.allocate("parameters", parameter.size * FLOAT32)

    def step(self, ledger: Ledger, *, first: bool) -> None:
        update(ledger, self.setup, self.sizes_by_group, FLOAT32, first=first)
        self.release_gradients(ledger)


class UnfusedStates(ReplicatedStates):
    """FP16_UnfusedOptimizer (runtime/fp16/unfused_optimizer.py), for bf16 and fp16 alike."""

    def initialise(self, ledger: Ledger) -> None:
        """__init__ and initialize_optimizer_states, which takes a step with zeros."""
        element, parameters = self.setup.element, self.setup.parameters
        for parameter in parameters:
            ledger.allocate("parameters", parameter.size * element)
        for parameter in parameters:
            with borrowed(ledger, parameter.size * element):
                ledger.allocate("master_weights", parameter.size * FLOAT32)
        count = sum(parameter.size for parameter in parameters)
        with borrowed(ledger, count * (element + FLOAT32)):
            update(ledger, self.setup, self.sizes_by_group, FLOAT32, first=True)

    def step(self, ledger: Ledger, *, first: bool) -> None:
        """step, and DeepSpeedEngine._take_model_step."""
        for sizes in self.sizes_by_group:
            borrow(ledger, max(sizes) * FLOAT32)  # get_weight_norm
            ledger.allocate("gradients", sum(sizes) * FLOAT32)
        update(ledger, self.setup, self.sizes_by_group, FLOAT32, first=False)
        for sizes in self.sizes_by_group:
            ledger.free("gradients", sum(sizes) * FLOAT32)
        self.release_gradients(ledger)


class FusedStates(ReplicatedStates):
    """FP16_Optimizer (runtime/fp16/fused_optimizer.py), for DeepSpeed's FusedAdam on a GPU.

    Read, not measured.
    """

    def initialise(self, ledger: Ledger) -> None:
        """__init__ and initialize_optimizer_states, which takes a step with zeros."""
        element = self.setup.element
        for parameter in self.setup.parameters:
            ledger.allocate("parameters", parameter.size * element)
        flat = []
        for group in self.setup.groups:
            sizes = [parameter.size * element for parameter in group.parameters]
            flat.append(sum(sizes) // element)
            with borrowed(ledger, sum(sizes)):  # clones, from which it is flattened
                replace(ledger, "parameters", sizes, sum(sizes))
            with borrowed(ledger, sum(sizes)):
                ledger.allocate("master_weights", flat[-1] * FLOAT32)
        with borrowed(ledger, sum(flat) * FLOAT32):
            update(ledger, self.setup, [[size] for size in flat], FLOAT32, first=True)

    def step(self, ledger: Ledger, *, first: bool) -> None:
        """step: each group's gradients become one float32 tensor."""
        sizes = []
        for group in self.setup.groups:
            sizes.append(sum(parameter.size for parameter in group.parameters))
            with borrowed(ledger, sizes[-1] * FLOAT32):
                ledger.allocate("gradients", sizes[-1] * FLOAT32)
            for parameter in group.parameters:
                ledger.free("gradients", self.gradients.pop(parameter.name))
        update(ledger, self.setup, [[size] for size in sizes], FLOAT32, first=False)
        for size in sizes:
            ledger.free("gradients", size * FLOAT32)


class Bf16States(ReplicatedStates):
    """BF16_Optimizer (runtime/bf16_optimizer.py): stage 1, bf16, gradients summed in float32.

    Only optimizer states and master weights are partitioned, the float32 sum is not.
    """

    def initialise(self, ledger: Ledger) -> None:
        """_setup_for_real_optimizer."""
        element = self.setup.element
        for parameter in self.setup.parameters:
            ledger.allocate("parameters", parameter.size * element)
        for group in self.setup.groups:
            flatten_weights(ledger, group, element)
            with borrowed(ledger, group.share * element):
                ledger.allocate("master_weights", group.share * FLOAT32)
            ledger.allocate("gradients", group.flat * FLOAT32)

    @property
    def adds_at_once(self) -> bool:
        return bool(self.setup.section["bf16"].get("immediate_grad_update"))

    def gradient(self, ledger: Ledger, parameter: Parameter) -> None:
        """With immediate_grad_update, accumulate_hp_grads_and_remove_lp."""
        if not self.adds_at_once:
            super().gradient(ledger, parameter)
            return
        borrow(ledger, parameter.size * FLOAT32)
        ledger.free("gradients", parameter.size * self.setup.element)

    def end_micro_batch(self, ledger: Ledger, number: int) -> None:
        """update_hp_grads, then at the boundary DeepSpeedEngine.buffered_allreduce_fallback."""
        if not self.adds_at_once:
            borrow(ledger, max(p.size for p in self.setup.parameters) * FLOAT32)
        if number + 1 == self.setup.accumulation_steps:
            sizes = [group.flat for group in self.setup.groups]
            all_reduce(ledger, sizes, FLOAT32, self.setup.communication_element)

    def step(self, ledger: Ledger, *, first: bool) -> None:
        """step, and DeepSpeedEngine._take_model_step."""
        groups = self.setup.groups
        update(ledger, self.setup, [[group.share] for group in groups], FLOAT32, first=first)
        gather_weights(ledger, self.setup, groups)
        self.release_gradients(ledger)
