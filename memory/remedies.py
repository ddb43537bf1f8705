"""What would cure an out-of-memory error, ranked."""

from __future__ import annotations

from collections.abc import Iterator

from configs.schema import RunConfig, changed
from memory.cures import (
    ACCUMULATION,
    MICRO_BATCH,
    POLICIES,
    ZERO,
    Cure,
    cures,
    search,
    with_policies,
)
from memory.diagnosis import HELD, Observation, Proposal, Rule
from memory.ledger import Category, Sample
from memory.machine import Machine
from memory.planner import Plan, Planner

SMALLER_MICRO_BATCH = (
    "a smaller micro-batch and as much more accumulation "
    "(deepspeed.train_micro_batch_size_per_gpu, deepspeed.gradient_accumulation_steps)"
)
MORE_MAIN_MEMORY = (
    "more main memory for the job (--mem in SLURM, resources.limits.memory in Kubernetes, "
    "--memory in docker), or fewer processes on each host"
)
GENERAL: dict[Rule, tuple[str, ...]] = {
    "loss": ("the loss in chunks (training.loss=auto)", SMALLER_MICRO_BATCH),
    "optimizer_step": (
        "optimizer states divided over the GPUs (deepspeed.zero_optimization.stage=1 or more)",
        "optimizer states on the host (deepspeed.zero_optimization.offload_optimizer)",
    ),
    "capacity": (
        SMALLER_MICRO_BATCH,
        "blocks that keep less (activation_checkpointing.policies)",
        "parameters, gradients and states divided over the GPUs "
        "(deepspeed.zero_optimization.stage)",
    ),
    "save": (
        MORE_MAIN_MEMORY,
        "states divided over more ranks (deepspeed.zero_optimization.stage): each rank copies "
        "its own",
    ),
    "host": (MORE_MAIN_MEMORY,),
    "host_killed": (MORE_MAIN_MEMORY, "`dmesg -T | grep -i oom` names what the kernel killed"),
    "shared_memory": (
        "more shared memory (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir "
        "with medium: Memory at /dev/shm)",
        "fewer data-loader workers, each of which has batches there",
    ),
}


def general(rule: Rule, observation: Observation) -> list[Proposal]:
    """What helps whatever the run is."""
    figures = observation.figures
    if rule == "fragmentation":
        unused = (figures.reserved or 0) - (figures.allocated or 0)
        changes = {"training.expandable_segments": True}
        return [Proposal(changes, saving=unused, slowdown=1.0, fits=True)]
    if rule == "other_process":
        advice = "end the other processes (nvidia-smi lists them), or use another GPU"
        return [Proposal({}, advice, saving=observation.others, slowdown=1.0, fits=True)]
    return [Proposal({}, advice) for advice in GENERAL[rule]]


def proposals(
    rule: Rule, observation: Observation, config: RunConfig, plan: Plan
) -> tuple[int | None, list[Proposal]]:
    """Bytes to save, and changes to the config: what suffices, by the step's time, then the rest.

    `plan` is the run's own.
    """
    if rule == "shared_memory":
        return observation.figures.requested, []  # no setting of this project's runs uses it
    if rule == "save":
        return observation.figures.requested, _smaller_saves(observation, config, plan)
    host = rule in ("host", "host_killed")
    limit = (host_limit if host else device_limit)(observation, plan)
    if host:
        has = plan.machine.gpu_memory or observation.figures.capacity
        machine = plan.machine._replace(host_memory=limit, gpu_memory=has)
    else:
        machine = plan.machine._replace(gpu_memory=limit)
    now = Planner(config, machine).plan(plan.policies)
    found = [*cures(config, machine, now), *_smaller_micro_batches(config, machine, now)]
    if host:
        found += _off_the_host(config, machine, now)
    if not any(cure.plan.fits and cure.machine == machine for cure in found):
        over = {"micro_batch"} | ({"zero_stage"} if machine.gpus > 1 else set())
        over |= {"offload"} if machine.device == "cuda" else set()
        found.append(search(config, machine, frozenset(over)))
    found.sort(
        key=lambda cure: (
            not cure.plan.fits,
            cure.machine != machine,
            cure.plan.gpu.shortfall + cure.plan.host.shortfall,
            _preference(rule, cure),
            cure.plan.step.total,
        )
    )
    unique = {repr((sorted(cure.changes.items()), cure.machine.gpus)): cure for cure in found}
    missing = now.host.shortfall if host else now.gpu.shortfall
    proposed = [_proposal(cure, now, host=host) for cure in unique.values()]
    return missing, [cure for cure in proposed if cure.fits or (cure.saving or 0) > 0]


def _smaller_saves(observation: Observation, config: RunConfig, plan: Plan) -> list[Proposal]:
    """What leaves a rank less to save: its share of states, which no policy of a block changes."""
    machine = plan.machine._replace(gpu_memory=None, host_memory=None)
    found = []
    for cure in cures(config, machine, plan):
        saving = _saved_bytes(plan) - _saved_bytes(cure.plan)
        if saving > 0 and cure.machine == machine:
            slowdown = cure.plan.step.total / plan.step.total
            fits = saving >= (observation.figures.requested or 1)
            found.append(Proposal(cure.changes, saving=saving, slowdown=slowdown, fits=fits))
    return sorted(found, key=lambda proposal: not proposal.fits)


def _saved_bytes(plan: Plan) -> int:
    """Of parameters, master weights and optimizer states of one rank, wherever they are."""
    names: tuple[Category, ...] = ("parameters", "master_weights", "optimizer_states")
    ranks = 1 if plan.machine.device == "cpu" else plan.machine.ranks_per_node
    device, host = plan.gpu.timeline[-1].by_category, plan.host.timeline[-1].by_category
    on_host = 0 if plan.machine.device == "cpu" else sum(host.get(name, 0) for name in names)
    return sum(device.get(name, 0) for name in names) + on_host // ranks


def _proposal(cure: Cure, now: Plan, *, host: bool) -> Proposal:
    before, after = (plan.host if host else plan.gpu for plan in (now, cure.plan))
    return Proposal(
        cure.changes,
        saving=before.peak.total - after.peak.total,
        slowdown=cure.plan.step.total / now.step.total,
        fits=cure.plan.fits,
        gpus=cure.machine.gpus if cure.machine.gpus != now.machine.gpus else None,
    )


def _preference(rule: Rule, cure: Cure) -> int:
    """What ran out in the loss is the loss's to give back, before any block's."""
    if rule != "loss" or POLICIES in cure.changes:
        return 2
    return 0 if "training.loss" in cure.changes else 1 if MICRO_BATCH in cure.changes else 2


def _smaller_micro_batches(config: RunConfig, machine: Machine, now: Plan) -> Iterator[Cure]:
    """The largest that suffices alone, with the policies as they are; a half is in `cures`."""
    section = Planner(config, machine).section
    micro, steps = (section[key.split(".")[1]] for key in (MICRO_BATCH, ACCUMULATION))
    while micro % 2 == 0:
        micro, steps = micro // 2, steps * 2
        changes = {MICRO_BATCH: micro, ACCUMULATION: steps}
        cure = with_policies(Planner(changed(config, changes), machine), changes, now.policies)
        if cure.plan.fits and POLICIES not in cure.changes:
            yield cure
            return


def _off_the_host(config: RunConfig, machine: Machine, now: Plan) -> Iterator[Cure]:
    """What is offloaded back to the GPU, where it fits there."""
    zero = config.deepspeed.get("zero_optimization", {})
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name):
            changes = {f"{ZERO}.{name}": None}
            yield with_policies(Planner(changed(config, changes), machine), changes, now.policies)


def device_limit(observation: Observation, plan: Plan) -> int:
    """Bytes that a rank's device has for this run, as the plan counts them.

    Where nothing says, or where the plan would have fitted: what was held when it failed, which is
    the least that the device is known to have.
    """
    figures, peak = observation.figures, plan.gpu.peak.total
    limits = [] if plan.machine.gpu_memory is None else [plan.machine.gpu_memory]
    if figures.capacity is not None:
        limits.append(figures.capacity - (observation.others or 0))
    known = min(limits, default=peak)
    if known >= peak:
        known = _survived(observation, plan)
    return max(0, min(known, peak - (figures.requested or 1)))


def _survived(observation: Observation, plan: Plan) -> int:
    allocated = observation.figures.allocated
    if allocated is not None:
        return allocated + plan.gpu.peak.by_category.get("allowance", 0)
    # A CPU's allocator does not say, and the process holds much else. What was had: the plan's
    # highest moment before the one that failed, and all that was measured by category.
    before = [sample.total for sample in _until(observation, plan)[:-1]]
    held = sum((observation.held or {}).get(name, 0) for name in HELD)
    return max([*before, held]) if before else plan.gpu.peak.total


def host_limit(observation: Observation, plan: Plan) -> int:
    group, peak = observation.cgroup, plan.host.peak.total
    known = plan.machine.host_memory or (group.limit if group else None)
    if known is None or known >= peak:
        known = peak
    return max(0, min(known, peak - (observation.figures.requested or 1)))


def planned(observation: Observation, plan: Plan) -> dict[str, int] | None:
    """What the plan has at the moment of an observation, by category; None where it has none."""
    until = _until(observation, plan)
    if not until:
        return None
    sample = until[-1]
    held: dict[str, int] = {name: sample.by_category.get(name, 0) for name in HELD}
    return held | {"rest": sample.total - sum(held.values())}


def _until(observation: Observation, plan: Plan) -> list[Sample]:
    """The plan's moments up to the one that failed; none where the plan has no such moment."""
    # From a traceback alone it is only known which pass it was.
    names = {"forward": "embedding forward", "backward": "loss backward"}
    moment = names.get(observation.moment, observation.moment)
    timeline = plan.gpu.timeline
    found = [number for number, sample in enumerate(timeline) if sample.moment == moment]
    if (observation.held or {}).get("optimizer_states"):
        # Of the plan's two steps the one that has them: the second, or the first one's update.
        found = [n for n in found if timeline[n].by_category.get("optimizer_states")]
    return list(timeline[: found[0] + 1]) if found else []
