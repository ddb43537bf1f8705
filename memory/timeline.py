"""The timeline of a run: tapes of the model and DeepSpeed's states, replayed into a ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import cast

from memory.activations import Traced
from memory.ledger import Category, Ledger
from memory.policies import Policy
from memory.states import States
from memory.tape import Event

OFFLOADS_IN_FLIGHT = 2
"""max_fwd_stash_count of DeepSpeed's _ActivationOffloadEngine."""


class Timeline:
    """Replays initialisation and steps of one rank."""

    def __init__(
        self,
        ledger: Ledger,
        traced: Traced,
        policies: Sequence[Policy],
        states: States,
        *,
        tied: bool,
    ) -> None:
        self.ledger = ledger
        self.traced = traced
        self.policies = policies
        self.states = states
        self.tied = tied
        self.parameters = {parameter.name: parameter for parameter in states.setup.parameters}
        self._shared: dict[str, int] = {}  # gradients that wait for their other half
        self._on_device: deque[int] = deque()  # offloaded blocks whose input is still there

    def run(self) -> None:
        """Initialise and take two steps: the first creates optimizer states, the second has them.

        Of a step's micro-batches the first two and the last are replayed: those between repeat the
        second.
        """
        self.ledger.begin("initialisation")
        self.states.initialise(self.ledger)
        last = self.states.setup.accumulation_steps - 1
        for step in (1, 2):
            for number in sorted({0, min(1, last), last}):
                self.micro_batch(number)
            self.ledger.begin("optimizer step")
            self.states.step(self.ledger, first=step == 1)
        # Saving allocates nothing on the device (measured at every stage).
        self.ledger.begin("checkpoint save")

    def micro_batch(self, number: int) -> None:
        head = self.traced.head
        blocks = [self.traced.blocks[policy] for policy in self.policies]
        batch = self.traced.batch
        self.ledger.begin("embedding forward")
        self.ledger.allocate("buffers", batch)
        self._play(self.traced.embedding.forward)
        for index, tape in enumerate(blocks):
            self.ledger.begin(f"block {index} forward")
            self._play(tape.forward, index)
            if self.policies[index] == "offload":
                self._offload(index)
        self.ledger.begin("loss forward")
        self.ledger.move("activations", "loss", self.traced.hidden)
        self._play(head.forward)
        self.ledger.begin("loss backward")
        self._play(head.backward)
        self.ledger.move("loss", "transient", self.traced.hidden)
        for index, tape in reversed([*enumerate(blocks)]):
            self.ledger.begin(f"block {index} backward")
            if self.policies[index] == "offload":
                self._restore(index)
            self._play(tape.backward, index)
        self.ledger.begin("embedding backward")
        self._play(self.traced.embedding.backward)
        self.states.end_micro_batch(self.ledger, number)
        self.ledger.free("buffers", batch)

    def _play(self, events: Iterable[Event], block: int = 0) -> None:
        ledger, states = self.ledger, self.states
        for kind, subject, size in events:
            if kind == "allocate":
                ledger.allocate(cast(Category, subject), size)
            elif kind == "free":
                ledger.free(cast(Category, subject), size)
            else:
                name = subject.replace("blocks.0.", f"blocks.{block}.")
                if kind == "gradient":
                    self._gradient(name, size)
                else:
                    getattr(states, kind)(ledger, name)

    def _offload(self, block: int) -> None:
        """DeepSpeed's _ActivationOffloadEngine: two inputs are on their way at a time (read)."""
        self.ledger.allocate("activations", self.traced.hidden, "host")
        self._on_device.append(block)
        if len(self._on_device) > OFFLOADS_IN_FLIGHT:
            self._on_device.popleft()
            self.ledger.free("activations", self.traced.hidden)

    def _restore(self, block: int) -> None:
        if block in self._on_device:
            self._on_device.remove(block)
        else:
            self.ledger.allocate("activations", self.traced.hidden)
        self.ledger.free("activations", self.traced.hidden, "host")

    def _gradient(self, name: str, size: int) -> None:
        """A tied matrix gets a gradient from both its uses: the first waits for the second."""
        self.ledger.allocate("gradients", size)
        if self.tied and name == "token_embedding.weight":
            if name not in self._shared:
                self._shared[name] = size
                return
            # Their sum is a third tensor (measured): autograd adds up in place what nothing views,
            # and the head's half is a transposed view.
            self.ledger.allocate("gradients", size)
            self.ledger.free("gradients", size)
            self.ledger.free("gradients", self._shared.pop(name))
        self.states.gradient(self.ledger, self.parameters[name])
