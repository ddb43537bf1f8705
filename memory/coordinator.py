"""Which parameters of ZeRO stage 3 are together on a rank, and when.

DeepSpeed puts a parameter together when a module that holds it begins and takes it apart when the
module ends. From the second forward and backward on it knows the order of the modules: it fetches
ahead of use, and keeps what is needed again soon. A method's docstring begins with the name of its
counterpart in runtime/zero: partitioned_param_coordinator.py or partition_parameters.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memory.ledger import Ledger
from memory.states import Parameter, Setup, borrow

GLOO_THREADS = 2
"""torch's ProcessGroupGloo, by default."""
NEVER = -1
"""No step of the trace."""
Status = Literal["partitioned", "in flight", "available"]


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
        self.aliases: dict[str, list[int]] = {}
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
            shard, step = self.queue.popleft()
            shard.fetched_for = step
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
            borrow(ledger, share if self.staging else 0)
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
                    self.aliases.setdefault(module, []).append(held)

    def drop_aliases(self, ledger: Ledger, module: str) -> None:
        for size in self.aliases.pop(module, ()):
            ledger.free("parameters", size)

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
        borrow(ledger, size if self.gloo else 0)


def shard_of(parameter: Parameter, ranks: int) -> Shard:
    share = -(-parameter.size // ranks)
    return Shard(parameter, share, share * ranks)


def offload_device(zero: Mapping[str, Any], key: str) -> str:
    return str((zero.get(key) or {}).get("device") or "none")


def containers(module: str) -> list[str]:
    """The modules around one, outermost first: "" is the model; a list of blocks is never called.

    >>> containers("blocks.3.attention.qkv")
    ['', 'blocks.3', 'blocks.3.attention']
    """
    parts = module.split(".")[:-1]
    found = [".".join(parts[: length + 1]) for length in range(len(parts))]
    return ["", *(name for name in found if name != "blocks")]
