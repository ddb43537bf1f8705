"""Pretrain a GPT with DeepSpeed: parse, check, build, loop, save.

    deepspeed train.py --config configs/quickstart.json
    torchrun --nproc_per_node 2 train.py --config configs/quickstart.json
    python train.py --config configs/quickstart.json --set training.max_steps=20

Run again on the same run folder, it continues from the newest checkpoint. Exit codes: 0 done, 1
failed, 2 a mistake in the config or the command, 75 stopped early by a signal or a time limit, with
a checkpoint saved: run it again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from configs.reading import ConfigError
from configs.schema import load_config
from data.dataset import VocabularyError
from memory.checkpointing import checkpoint_blocks
from memory.plan import add_machine, machine_of
from training import checkpoint, metrics
from training.agreement import RanksDisagree
from training.alarm import Alarm
from training.check import check
from training.engine import (
    Ranks,
    build_engine,
    leave,
    read_ranks,
    seed_step,
    start_process_group,
    train_step,
)
from training.evaluate import mean, validation_batches, validation_loss
from training.extensions import BuildError
from training.guard import BadSteps, RollBack
from training.out_of_memory import (
    OutOfMemory,
    Whereabouts,
    bytes_by_category,
    explained,
    report_out_of_memory,
)
from training.pulse import Pulse
from training.rehearse import any_rank, give_back_memory, rehearse
from training.replicas import ReplicasDiffer, check_replicas
from training.saver import SaveFailed, Saver
from training.say import conclude, describe, describe_milder, fail, say
from training.session import Session, beginning, open_session, roll_back
from training.setup import Run, prepare, resume
from training.stop import RESUMABLE, Stop, ends_at
from training.tracking import Event, MetricsWriter
from training.universal import NotConverted, load_converted
from training.unpickling import Refused
from training.watchdog import Watchdog

FAILURES = (
    BadSteps, BuildError, checkpoint.NoCheckpoint, NotConverted, RanksDisagree, Refused,
    ReplicasDiffer, SaveFailed,
)  # fmt: skip
"""What every rank comes to, and says in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ranks = None
    try:
        ranks = read_ranks(options.local_rank)
        config = load_config(options.config, options.overrides)
        if options.check or options.dry_run:
            return check(config, machine_of(options), dry_run=options.dry_run)
        run = prepare(config, ranks, restart=options.restart)
    except (ValueError, OSError) as error:
        return fail(error, 2, ranks)
    where, alarm = Whereabouts(), Alarm(ranks.rank)
    try:
        start_process_group(ranks, expandable_segments=config.training.expandable_segments)
        with alarm:
            run = resume(run, restart=options.restart, change_layout=options.change_layout)
            if run.start.step < config.training.max_steps:
                code = train(run, where)
            else:
                say(ranks, f"{config.training.run_folder}: done, at step {run.start.step}")
                code = 0
    except ConnectionError as error:
        return fail(error, 1)
    except ConfigError as error:
        return fail(error, 2, ranks)
    except VocabularyError as error:
        return fail(error, 2)
    except FAILURES as error:
        return fail(error, 1, ranks)
    except OutOfMemory as error:
        return explain(error.bare(), where)
    except OSError as error:
        return alarm.ring(error)
    torch.distributed.destroy_process_group()
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: deepspeed train.py --config configs/quickstart.json",
    )
    parser.add_argument("--config", required=True, help="the run's JSON file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the config, as in training.max_steps=20 (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="print the resolved config and its plan, and exit"
    )
    parser.add_argument(
        "--dry-run", action="store_true",
        help="--check, and the first batch read, the model at full shape through one step's passes",
    )  # fmt: skip
    add_machine(parser.add_argument_group("hardware that --check and --dry-run are for"))
    parser.add_argument(
        "--restart", action="store_true",
        help="begin at step 0; what the run folder holds is kept in its folder before-restart-N",
    )  # fmt: skip
    parser.add_argument(
        "--change-layout", action="store_true",
        help="continue on other ranks, another ZeRO stage or tensor-parallel size than before",
    )  # fmt: skip
    # DeepSpeed's launcher writes the first spelling, older torch launchers the second.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def train(run: Run, where: Whereabouts) -> int:
    """Returns the exit code."""
    with explained(where, run):
        run, engine = ready(run, where)
    if run.ranks.rank == 0:
        checkpoint.save_config(run.asked)
        checkpoint.save_plan(run.config, run.plan().as_json())
    if run.checkpoint and run.converted_from:
        load_converted(engine, run.config, run.checkpoint, run.converted_from)
    elif run.checkpoint:
        checkpoint.load_checkpoint(engine, run.checkpoint)
    describe(run, engine)
    pulse = Pulse()
    saver = Saver(engine, run, pulse)
    end = ends_at(run)
    if end is not None:
        say(run.ranks, f"time       ends in {end - time.time():,.0f} s, a checkpoint comes before")
    with Stop(pulse, end) as stop, Watchdog(pulse, where, run):
        try:
            validation, reason = to_the_end(run, engine, stop, saver, pulse, where)
        except (BadSteps, ReplicasDiffer):
            saver.close()  # all ranks are here
            raise
        pulse.enter("save")
        saver.close()
    if reason:
        say(run.ranks, f"stopped by {reason}; a checkpoint is saved, the same command continues")
        return RESUMABLE
    conclude(run, validation)
    return 0


def to_the_end(
    run: Run, engine: Any, stop: Stop, saver: Saver, pulse: Pulse, where: Whereabouts
) -> tuple[float, str | None]:
    """As `loop`, over as many rollbacks as it takes."""
    rollbacks, news = list[int](), beginning(run)
    while True:
        try:
            with explained(where, run), open_session(run, engine, stop, saver) as session:
                return loop(run, engine, session, pulse, where, news)
        except RollBack as spike:
            run, event = roll_back(run, engine, saver, spike, rollbacks)
            news = [event]


def ready(run: Run, where: Whereabouts) -> tuple[Run, Any]:
    """An engine with its policies, after a rehearsal where the run has one.

    All ranks go the same way: when the run does not fit on one, none trains it.

    Raises:
        OutOfMemory: it does not fit, and nothing milder is asked for, or left.
    """
    while True:
        engine = build_engine(run.config, run.section, run.ranks, run.initial_weights)
        checkpoint_blocks(engine, run.config, run.policies)
        where.watch(engine)
        if not run.rehearses:
            return run, engine
        failure = rehearsed(run, engine, where)
        if not any_rank(failure is not None, run.ranks.device):
            return run, engine
        where.release_engine()
        del engine
        give_back_memory(run.ranks.device)
        milder = run.milder() if run.config.training.on_out_of_memory == "adapt" else None
        if milder is None:
            raise failure or OutOfMemory(run, observation=None)
        say(run.ranks, f"adapting   {describe_milder(run, milder)}")
        run = milder


def rehearsed(run: Run, engine: Any, where: Whereabouts) -> OutOfMemory | None:
    """None where it fits."""
    try:
        with explained(where, run):
            training = run.config.training
            rehearse(engine, run.config.model.vocabulary_size, training.sequence_length)
    except OutOfMemory as failure:
        return failure.bare()
    return None


def explain(failure: OutOfMemory, where: Whereabouts) -> int:
    """Where memory ran out, and what would help; on a rank that had enough, nothing."""
    where.release_engine()
    give_back_memory(failure.run.ranks.device)
    if failure.observation:
        report_out_of_memory(failure.run, failure.observation)
    return 1


def loop(
    run: Run, engine: Any, session: Session, pulse: Pulse, where: Whereabouts, news: list[Event]
) -> tuple[float, str | None]:
    """Train, log, evaluate and save; returns the last validation loss, and why it stopped early.

    Raises:
        RollBack, BadSteps, ReplicasDiffer: a step says that the run cannot go on like this.
    """
    training, ranks, validation = run.config.training, run.ranks, math.nan
    loader, writer, guard, speed = session.loader, session.writer, session.guard, session.speed
    saver = session.saver
    where.moment = "evaluation"
    for event in news:
        writer.event(run.start.step, event)
    if not run.checkpoint:
        validation = evaluate(run, engine, 0, writer)
    for step in range(run.start.step + 1, training.max_steps + 1):
        pulse.enter("step")
        seed_step(training.seed, step, ranks.data_rank)
        lr, before = engine.get_lr()[0], loader.samples_consumed
        train_step(engine, loader, guard.judge)
        outcome = guard.outcome(step, before, loader.samples_consumed)
        speed.steps += 1
        saver.poll()
        writer.step(step)
        done = step == training.max_steps
        last = done or outcome.stop is not None
        if last or step % training.log_interval == 0:
            writer.training(
                {
                    "step": step,
                    "samples": loader.samples_consumed,
                    "tokens": loader.samples_consumed * training.sequence_length,
                    "loss": outcome.loss,
                    "lr": lr,
                    "grad_norm": gradient_norm(engine),
                    "skipped_steps": engine.skipped_steps,
                    **guard.scale(),
                    **speed.read(loader.wait_seconds),
                }
            )
            look_for_leak(session, engine, ranks, step)
        if training.replica_check_interval and step % training.replica_check_interval == 0:
            check_replicas(engine, ranks, step)
        if done or (not last and step % training.evaluation_interval == 0):
            pulse.enter("evaluation")
            where.moment = "evaluation"
            with speed.paused():
                validation = evaluate(run, engine, step, writer)
        if last or step % training.save_interval == 0:
            pulse.enter("save")
            where.moment = "checkpoint save"
            with speed.paused():
                writer.sync()
                saver.save(session.progress(run, step))
            guard.has_checkpoint = True
        if last and not done:
            return validation, outcome.stop
    return validation, None


def look_for_leak(session: Session, engine: Any, ranks: Ranks, step: int) -> None:
    alive = metrics.alive_memory(ranks.device, bytes_by_category(engine))
    if leak := session.leaks.read(alive):
        print(f"warning    rank {ranks.rank}, step {step}: {leak}", flush=True)


def gradient_norm(engine: Any) -> float | None:
    """Global L2 norm of the last update's gradients, before clipping."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def evaluate(run: Run, engine: Any, step: int, writer: MetricsWriter) -> float:
    """Log each validation set's loss; returns their mean, each set counting the same."""
    losses = {
        name: validation_loss(engine, validation_batches(run, engine, corpus))
        for name, corpus in run.validation_data.items()
    }
    writer.evaluation(step, losses)
    return mean(losses)


if __name__ == "__main__":
    leave(main())
