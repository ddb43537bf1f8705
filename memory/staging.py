"""Host memory of saving in the background: a copy of what each rank writes to a checkpoint.

training/writer.py makes it at the first save and keeps it for the next ones.
"""

from __future__ import annotations

from typing import NamedTuple

from memory.ledger import Category, Ledger
from memory.states import Setup

PARTITIONED: tuple[Category, ...] = ("master_weights", "optimizer_states")


class Staged(NamedTuple):
    """In bytes. Copies of page-locked tensors are not page-locked themselves."""

    every_rank: int
    first_rank: int
    """Of the first data-parallel rank alone, once for each of its tensor-parallel parts."""

    def on_host(self, ranks: int, parts: int) -> int:
        """On the host that has the first data-parallel rank, and `ranks` in all."""
        return ranks * self.every_rank + min(ranks, parts) * self.first_rank


def staged(ledger: Ledger, setup: Setup) -> Staged:
    """What is copied of the states that are alive between two steps.

    DeepSpeedEngine.save_checkpoint (read): at stage 0 the first rank writes everything; at stages 1
    and 2 it writes the parameters, and every rank its share of master weights and optimizer states;
    at stage 3 there is nothing but shares.
    """
    alive = ledger.alive.values()
    held = sum(place[category] for place in alive for category in PARTITIONED)
    states = held - sum(ledger.slack[category] for category in PARTITIONED)
    parameters = sum(parameter.size for parameter in setup.parameters) * setup.element
    if setup.stage == 3:
        return Staged(states, 0)
    return Staged(states, parameters) if setup.stage else Staged(0, states + parameters)
