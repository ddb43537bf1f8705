"""The replayed states of ZeRO stages 0 to 2 against real trainings, and against formulas by hand.

What DeepSpeed does is measured allocation by allocation: in deepspeed.initialize, as each gradient
is complete, after backward and in the update. Scalars (norms, step counts) are not replayed: hence
the tolerance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import get_default_build_root

from benchmarks.memory_events import Moment, measure
from configs.deepspeed import Hardware, resolve
from configs.schema import RunConfig
from memory.ledger import Ledger, Place
from memory.optimizers import ADDING_ONE, STATES
from memory.replicated import Bf16States, Float32States, FusedStates, UnfusedStates
from memory.stages12 import FLOAT64, OffloadedStates, ZeroStates
from memory.states import (
    ALIGNMENT,
    ALL_REDUCE_ELEMENTS,
    WIDE_TYPES,
    Group,
    Parameter,
    Setup,
    buckets,
    states_of,
)
from model.gpt import GPT, parameter_rules

TOLERANCE = 0.001
"""Of the run's peak, 500 to 800 kB; scalars take 250 bytes."""

BF16 = {"deepspeed.bf16": {"enabled": True}}
WIDE_SUM = {**BF16, "deepspeed.data_types": {"grad_accum_dtype": "fp32"}}
AT_ONCE = {**WIDE_SUM, "deepspeed.bf16": {"enabled": True, "immediate_grad_update": True}}
LOW = {"deepspeed.bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
LOWEST = {"deepspeed.bf16": {**LOW["deepspeed.bf16"], "bf16_optimizer_states": True}}
PRECISIONS = {"float32": {}, "bf16": BF16, "bf16 summed in float32": WIDE_SUM}
TORCH_ADAM = {"deepspeed.optimizer.params.torch_adam": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
TWICE = {"deepspeed.gradient_accumulation_steps": 2}
SGD = {
    "deepspeed.optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "deepspeed.zero_allow_untested_optimizer": True,
}

Changes = dict[str, Any]


def zero(stage: int, **block: Any) -> Changes:
    return {"deepspeed.zero_optimization": {"stage": stage, **block}}


def stages() -> Iterator[tuple[str, Changes]]:
    """Every stage, precision, place of the optimizer and number of micro-batches."""
    for steps in (1, 2):
        accumulation = {"deepspeed.gradient_accumulation_steps": steps}
        for name, precision in PRECISIONS.items():
            for stage in (0, 1, 2):
                run = precision | accumulation
                if stage or precision is not WIDE_SUM:
                    yield f"stage {stage}, {name}, {steps}", run | zero(stage)
                if stage:
                    offloaded = run | TORCH_ADAM | zero(stage, **OFFLOAD)
                    yield f"stage {stage}, {name}, {steps}, offload", offloaded


def options() -> Iterator[tuple[str, Changes]]:
    """Settings that change what is allocated, each where it can act."""
    blocks: dict[str, Changes] = {
        "small buckets": {"reduce_bucket_size": 5_000},
        "gradients larger than a bucket": {"reduce_bucket_size": 2_000},
        "not contiguous": {"contiguous_gradients": False},
        "overlap": {"overlap_comm": True, "reduce_bucket_size": 5_000},
        "overlap, not contiguous": {
            "overlap_comm": True,
            "contiguous_gradients": False,
            "reduce_bucket_size": 5_000,
        },
        "no reduce_scatter": {"reduce_scatter": False},
        "a message each rank": {"use_multi_rank_bucket_allreduce": False},
        "round robin": {"round_robin_gradients": True},
    }
    for stage in (1, 2):
        for name in ("float32", "bf16 summed in float32"):
            run = PRECISIONS[name] | TWICE
            for option, block in blocks.items():
                if (stage, name) != (1, "bf16 summed in float32"):  # it has none of these
                    yield f"stage {stage}, {name}, {option}", run | zero(stage, **block)
            for size in (2_000, 5_000):
                offloaded = TORCH_ADAM | zero(stage, reduce_bucket_size=size, **OFFLOAD)
                yield f"stage {stage}, {name}, offload, buckets of {size}", run | offloaded
        wide_messages = {"deepspeed.communication_data_type": "fp32"}
        yield f"stage {stage}, float32 sent", BF16 | TWICE | wide_messages | zero(stage)
        yield f"stage {stage}, all float32", WIDE_SUM | TWICE | wide_messages | zero(stage)
        yield f"stage {stage}, bf16 states", LOWEST | TWICE | zero(stage)
        without_norm = zero(stage, compute_grad_norm=False)
        yield f"stage {stage}, no norm", {"deepspeed.gradient_clipping": 0} | without_norm
    yield "stage 1, added at once", AT_ONCE | TWICE | zero(1)
    loop = {"deepspeed.optimizer.params.fused": False}
    optimizers: dict[str, Changes] = {
        "SGD": SGD,
        "foreach": {"deepspeed.optimizer.params.foreach": True},
        "loop": loop,
        "L2": loop | {"deepspeed.optimizer.type": "Adam"},
    }
    for stage, name in ((0, "float32"), (0, "bf16"), (2, "float32")):
        for optimizer, changes in optimizers.items():
            run = PRECISIONS[name] | zero(stage) | changes
            yield f"stage {stage}, {name}, {optimizer}", run
    yield "stage 0, not clipped", {"deepspeed.gradient_clipping": 0} | zero(0)
    untied = {"model.tied_embeddings": False, "training.decay_embeddings": False}
    yield "stage 2, untied", untied | zero(2)
    yield "stage 2, llama", {"model.preset": "llama"} | zero(2)


def deepspeed_adam() -> Iterator[tuple[str, Changes]]:
    """DeepSpeedCPUAdam, which is built by a compiler on first use."""
    precisions = {**PRECISIONS, "bf16 master": LOW, "bf16 states": LOWEST}
    for stage in (1, 2):
        for name, precision in precisions.items():
            for accumulation in ({"deepspeed.gradient_accumulation_steps": 1}, TWICE):
                (steps,) = accumulation.values()
                run = precision | accumulation | zero(stage, **OFFLOAD)
                yield f"stage {stage}, {name}, {steps}, DeepSpeedCPUAdam", run


def uneven() -> Iterator[tuple[str, Changes]]:
    """One matrix is several ranks' whole share, and the last rank's share has padding."""
    for stage in (1, 2):
        for name, precision in (PRECISIONS | {"bf16 states": LOWEST}).items():
            changes = precision | TWICE | zero(stage) | {"model.vocabulary_size": 2999}
            yield f"stage {stage}, {name}", changes


def setup_of(config: RunConfig, ranks: int, rank: int = 0) -> Setup:
    section = resolve(config, Hardware(ranks, "cpu", bf16=False))
    with torch.device("meta"):
        model = GPT(config.model)
    rules = parameter_rules(model, decay_embeddings=config.training.decay_embeddings)
    return Setup(
        parameters=[Parameter(n, p.numel(), rules[n].decay) for n, p in model.named_parameters()],
        section=section,
        data_ranks=ranks,
        element=2 if section.get("bf16", {}).get("enabled") else 4,
        accumulation_steps=section["gradient_accumulation_steps"],
        device="cpu",
        data_rank=rank,
    )


class Recorder(Ledger):
    """A ledger of one place that keeps every total."""

    def __post_init__(self) -> None:
        self.totals = [0]
        self.places = ("gpu",)
        super().__post_init__()

    def _sample(self, place: Place) -> None:
        self.totals.append(self.alive[place].total())

    def free(self, category: Any, size: int, place: Place = "gpu") -> None:
        super().free(category, size, place)
        self._sample("gpu")


class Replay:
    """Drives States by the measured moments, and compares what each of them allocates."""

    def __init__(self, setup: Setup, moments: list[Moment]) -> None:
        self.setup = setup
        self.ledger, self.states = Recorder(), states_of(setup)
        self.parameters = {parameter.name: parameter for parameter in setup.parameters}
        self.origin = next(moment.start for moment in moments if moment.name == "build")
        self.micro_batch = 0
        self.bytes_off: dict[str, int] = {}
        """Worst of each moment: of what it adds, of its peak, of the total after an update."""
        for moment in moments:
            self._follow(moment)

    def _follow(self, moment: Moment) -> None:
        kind, _, rest = moment.name.partition(" ")
        before = len(self.ledger.totals) - 1
        if kind == "initialize":
            self.states.initialise(self.ledger)
            self._compare(moment, self.origin, self.ledger.totals)
        elif kind == "gradient":
            self._gradient(moment, self.parameters[rest])
        elif kind == "reduce":
            self.states.end_micro_batch(self.ledger, self.micro_batch)
            self.micro_batch = (self.micro_batch + 1) % self.setup.accumulation_steps
            self._compare(moment, moment.start, self.ledger.totals[before:])
        elif kind == "step" and self.micro_batch == 0:
            self.states.step(self.ledger, first=rest.startswith("1."))
            self._compare(moment, moment.start, self.ledger.totals[before:])
            self._note(moment, moment.end - self.origin, self.ledger.totals[-1])

    def _gradient(self, moment: Moment, parameter: Parameter) -> None:
        size = parameter.size * self.setup.element
        self.ledger.allocate("gradients", size)
        before = len(self.ledger.totals) - 1
        self.states.gradient(self.ledger, parameter)
        totals = self.ledger.totals[before:]
        if self.micro_batch and self.adds_in_place:
            # What autograd has added to an earlier gradient it releases itself, around the hooks.
            assert totals.pop(0) - size == totals[0]
        self._compare(moment, moment.start, totals)

    @property
    def adds_in_place(self) -> bool:
        """Whether gradients stay in .grad from one micro-batch to the next."""
        setup = self.setup
        widened = setup.offloads_optimizer and setup.accumulation_element != setup.element
        at_once = setup.section.get("bf16", {}).get("immediate_grad_update", False)
        return setup.stage < 2 and not widened and not at_once

    def _compare(self, moment: Moment, start: int, totals: list[int]) -> None:
        self._note(moment, moment.end - start, totals[-1] - totals[0])
        self._note(moment, moment.peak - start, max(totals) - totals[0])

    def _note(self, moment: Moment, measured: int, replayed: int) -> None:
        worst = max(abs(measured - replayed), self.bytes_off.get(moment.name, 0))
        self.bytes_off[moment.name] = worst


def complete(altered: Callable[..., dict[str, Any]], changes: Changes, ranks: int) -> RunConfig:
    small = {"deepspeed.train_batch_size": 4 * ranks, "deepspeed.gradient_accumulation_steps": 1}
    return RunConfig.model_validate(altered(small | changes))


@pytest.fixture
def compare(altered: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    def run(runs: Iterator[tuple[str, Changes]], ranks: int, rank: int = 0) -> None:
        configs = {name: complete(altered, changes, ranks) for name, changes in runs}
        for name, moments in measure(configs, ranks, gradients=True, of_rank=rank).items():
            replay = Replay(setup_of(configs[name], ranks, rank), moments)
            allowed = TOLERANCE * max(moment.peak for moment in moments)
            off = {key: value for key, value in replay.bytes_off.items() if value > allowed}
            assert not off, (name, off)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_stage_allocates_what_deepspeed_does(
    compare: Callable[..., None], ranks: int
) -> None:
    compare(stages(), ranks)


@pytest.mark.slow
def test_every_option_allocates_what_deepspeed_does(compare: Callable[..., None]) -> None:
    compare(options(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_uneven_shares_are_of_each_ranks_own_size(compare: Callable[..., None], rank: int) -> None:
    compare(uneven(), 3, rank)


@pytest.mark.slow
@pytest.mark.skipif(
    not list(Path(get_default_build_root()).glob("*/cpu_adam/cpu_adam.so")),
    reason="DeepSpeedCPUAdam has not been compiled here; that takes minutes",
)
def test_deepspeed_cpu_adam_allocates_what_it_does(compare: Callable[..., None]) -> None:
    compare(deepspeed_adam(), 1)


def made(*sizes: int, section: Changes, **options: Any) -> Setup:
    """Parameters that all decay; AdamW, on one GPU unless said otherwise."""
    parameters = [Parameter(f"{index}", size, decays=True) for index, size in enumerate(sizes)]
    adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}}
    chosen = {"data_ranks": 1, "element": 2, "accumulation_steps": 1, "device": "cuda"} | options
    return Setup(parameters=parameters, section=adam | section, **chosen)


BF16_SECTION: Changes = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("section", "element", "expected"),
    [
        ({"zero_optimization": {"stage": 0}}, 4, Float32States),
        (BF16_SECTION, 2, UnfusedStates),
        (BF16_SECTION | {"optimizer": {"type": "Adam", "params": {}}}, 2, FusedStates),
        (BF16_SECTION | {"optimizer": {"type": "SGD", "params": {}}}, 2, UnfusedStates),
        ({"fp16": {"enabled": True}}, 2, UnfusedStates),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 9}}, 4, ZeroStates),
        (
            BF16_SECTION
            | {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            2,
            Bf16States,
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 9, **OFFLOAD}},
            4,
            OffloadedStates,
        ),
    ],
)
def test_the_class_is_that_of_the_optimizer_deepspeed_wraps(
    section: Changes, element: int, expected: type
) -> None:
    assert type(states_of(made(8, section=section, element=element))) is expected


def test_fused_adam_without_zero_takes_14_bytes_a_parameter_and_copies_all_gradients() -> None:
    section = BF16_SECTION | {"optimizer": {"type": "AdamW", "params": {}}}
    setup = made(600, 400, section=section)
    states, ledger = states_of(setup), Ledger()
    states.initialise(ledger)
    assert ledger.alive["gpu"].total() == 1000 * (2 + 4 + 8)
    for parameter in setup.parameters:
        ledger.allocate("gradients", parameter.size * 2)
        states.gradient(ledger, parameter)
    ledger.begin("step")
    states.step(ledger, first=True)
    # The gradients in bf16, in float32, and in float32 flattened.
    assert ledger.timeline["gpu"][-1].total == 1000 * (2 + 4 + 8) + 1000 * (2 + 4 + 4)
    assert ledger.alive["gpu"].total() == 1000 * (2 + 4 + 8)


def test_offloaded_from_a_gpu_pinned_memory_is_rounded_up_to_a_power_of_two() -> None:
    zero_section = {"stage": 2, "reduce_bucket_size": 1000, **OFFLOAD}
    setup = made(600, 400, section=BF16_SECTION | {"zero_optimization": zero_section})
    states, ledger = states_of(setup), Ledger()
    states.initialise(ledger)
    # On the host 4000 bytes of master weights and of their gradients, a copy of the weights in
    # bf16 (2000 bytes), a buffer of the largest gradient (1200); on the GPU weights and a buffer.
    assert ledger.alive["host"].total() == 4096 + 4096 + 2048 + 2048
    assert ledger.alive["gpu"].total() == 2000 + 1200
    zero_section["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    unpinned = Ledger()
    states_of(setup).initialise(unpinned)
    assert unpinned.alive["host"].total() == 4000 + 4000 + 2000 + 1200


def test_overlapping_communication_takes_a_second_bucket() -> None:
    def peak(overlaps: bool) -> int:
        block = {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": overlaps}
        setup = made(600, 400, section=BF16_SECTION | {"zero_optimization": block})
        states, ledger = states_of(setup), Ledger()
        states.initialise(ledger)
        ledger.begin("gradient")
        ledger.allocate("gradients", 400 * 2)
        states.gradient(ledger, setup.parameters[1])
        return ledger.timeline["gpu"][-1].total

    assert peak(True) - peak(False) == 1000 * 2


def test_a_share_has_pieces_of_parameters_and_the_last_one_padding() -> None:
    members = tuple(Parameter(name, size, True) for name, size in (("a", 5), ("b", 1), ("c", 8)))
    groups = [Group(members, ranks=3, rank=rank) for rank in range(3)]
    assert {group.flat for group in groups} == {18}  # the multiple of 2 x 3 from 14 on
    pieces = [{"a": 5, "b": 1}, {"c": 6}, {"c": 2}]
    assert [group.own_pieces for group in groups] == pieces
    assert [group.padding for group in groups] == [0, 0, 4]


def test_a_bucket_ends_with_the_tensor_that_exceeds_the_limit() -> None:
    assert list(buckets([3, 3, 3, 9, 1], limit=6)) == [[3, 3, 3], [9], [1]]


def test_optimizers_keep_as_many_states_as_torchs() -> None:
    lower = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim)}
    for kind in STATES.keys() & lower.keys():
        weight = torch.ones(7, requires_grad=True)
        plain = lower[kind]([weight], lr=0.1)
        accepted = inspect.signature(lower[kind]).parameters
        extended = lower[kind]([weight], lr=0.1, **{k: True for k in ADDING_ONE if k in accepted})
        weight.grad = torch.ones(7)
        for optimizer in (plain, extended):
            optimizer.step()
            kept = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
            added = sum(key in accepted for key in ADDING_ONE) if optimizer is extended else 0
            assert sum(value.numel() == 7 for value in kept) == STATES[kind] + added, kind


def test_constants_are_the_installed_deepspeeds() -> None:
    from deepspeed.runtime import bf16_optimizer, engine
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.zero import stage_1_and_2
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
    from deepspeed.runtime.zero.utils import get_norm_dtype

    for module in (stage_1_and_2, bf16_optimizer):
        assert f"self.nccl_start_alignment_factor = {ALIGNMENT} " in inspect.getsource(module)
    assert engine.MEMORY_OPT_ALLREDUCE_SIZE == ALL_REDUCE_ELEMENTS
    assert get_norm_dtype().itemsize == FLOAT64
    names = {name for name in DtypeEnum.fp32._all_values if isinstance(name, str)}
    assert set(WIDE_TYPES) == names - {"torch.float32"}
    defaults = DeepSpeedZeroConfig(stage=2)
    for key in ("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"):
        assert getattr(defaults, key) is True
    assert defaults.compute_grad_norm is True
    assert defaults.overlap_comm is defaults.round_robin_gradients is False
    assert DeepSpeedZeroOffloadOptimizerConfig().pin_memory is True
