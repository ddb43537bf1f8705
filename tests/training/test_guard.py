"""What is done about steps that go wrong, without an engine: limits, spikes, reports, replicas."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler

from configs.reading import ConfigError
from configs.schema import RunConfig
from data.token_file import TokenFileWriter
from data.tokenizer import load_tokenizer
from data.train_tokenizer import train_tokenizer
from training import checkpoint, samples
from training.engine import _check_gradients
from training.guard import REPORT, BadSteps, Finding, Guard, RollBack
from training.pulse import Pulse
from training.replicas import digest, odd_ones
from training.setup import open_data, require_untrained
from training.spikes import Spikes
from training.stop import Stop
from training.tracking import MetricsWriter


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Fp16Engine:
    """Skips as DeepSpeed does under fp16: by its own scaler, when the verdict is NaN."""

    device = torch.device("cpu")

    def __init__(self, fp16: bool) -> None:
        scaler = loss_scaler.DynamicLossScaler(2.0**4, 1000, 1.0, 1, False)
        self.optimizer = SimpleNamespace(loss_scaler=scaler)
        _check_gradients(self.optimizer)
        self.fp16, self.applied = fp16, True

    def fp16_enabled(self) -> bool:
        return self.fp16

    def was_step_applied(self) -> bool:
        return self.applied

    def take(self, applied: bool) -> None:
        self.applied = applied
        self.optimizer.loss_scaler.update_scale(not applied)
        self.optimizer.loss_scale = self.optimizer.loss_scaler.cur_scale


FINDING = Finding(0, 1, "backward", "block 3", ["gradient of its input"], [18, 19], ["text"])


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Guard]]:
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it is quiet there
    with MetricsWriter(tmp_path, start_step=0, max_steps=10, enabled=True) as writer:

        def guard(engine: Any, limit: int = 3, rolls_back: bool = False) -> Guard:
            return Guard(
                engine,
                Stop(Pulse(), None),
                Spikes(3.0),
                writer,
                investigate=lambda *_: [FINDING],
                limit=limit,
                rolls_back=rolls_back,
                folder=tmp_path,
            )

        yield guard


def take(guard: Guard, engine: Fp16Engine, step: int, loss: float, overflow: bool = False) -> Any:
    verdict = guard.judge(torch.tensor(loss))
    engine.take(applied=bool(verdict == 1.0) and not overflow)
    return guard.outcome(step, 8 * step - 8, 8 * step)


def test_good_steps_between_bad_ones_start_the_count_again(make: Callable[..., Guard]) -> None:
    engine = Fp16Engine(fp16=False)
    guard = make(engine)
    for step, loss in enumerate((math.nan, math.inf, 1.0, math.nan, math.nan), 1):
        take(guard, engine, step, loss)
    with pytest.raises(BadSteps, match=r"^3 bad steps in a row, the last of them step 6: non-fin"):
        take(guard, engine, 6, math.nan)


def test_a_loss_scale_at_its_floor_stops_the_run_with_its_history(
    make: Callable[..., Guard], tmp_path: Path
) -> None:
    engine = Fp16Engine(fp16=True)
    guard = make(engine, limit=7)
    for step in range(1, 7):
        take(guard, engine, step, 1.0, overflow=True)
    assert guard.scale() == {"loss_scale": 1.0}
    # 16, halved by every overflow, and not below 1: DeepSpeed would raise there.
    expected = r"loss scales so far 8, 4, 2, 1, 1, 1, 1: use bf16, or lower the learning rate"
    with pytest.raises(BadSteps, match=expected):
        take(guard, engine, 7, 1.0, overflow=True)
    report = json.loads((tmp_path / REPORT).read_text())
    assert [scale for _, scale in report["loss_scales"]] == [8, 4, 2, 1, 1, 1, 1]
    # Overflow is usual under fp16: only the last one is looked into.
    assert [bool(entry["findings"]) for entry in report["bad_steps"]] == [False] * 6 + [True]


def test_a_bad_step_is_reported_with_its_first_place(
    make: Callable[..., Guard], tmp_path: Path
) -> None:
    engine = Fp16Engine(fp16=False)
    take(make(engine), engine, 5, 1.0, overflow=True)
    (entry,) = json.loads((tmp_path / REPORT).read_text())["bad_steps"]
    assert entry["step"] == 5
    assert entry["reason"] == "non-finite gradients"
    assert entry["samples_consumed_before_and_after"] == [32, 40]
    assert entry["findings"][0]["place"] == "block 3"
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line == {
        "step": 5,
        "kind": "skipped",
        "event": "update skipped, non-finite gradients: block 3 backward, gradient of its input, "
        "micro-batch 1 of rank 0, samples 18 to 19",
    }


def test_a_spike_is_by_the_losses_before_it() -> None:
    losses = [2.0 + 0.1 * (n % 5) for n in range(Spikes.WINDOW)]
    spikes = Spikes(3.0)
    for n, loss in enumerate(losses):
        assert (spikes.bound == math.inf) == (n < Spikes.FEWEST)
        spikes.add(loss)
    assert spikes.bound == pytest.approx(statistics.fmean(losses) + 3 * statistics.stdev(losses))
    for _ in range(Spikes.WINDOW):
        spikes.add(7.0)
    assert spikes.bound == pytest.approx(7.0), "older losses are forgotten"
    assert Spikes(None, losses).bound == math.inf
    resumed = Spikes(3.0, losses)
    assert resumed.bound == Spikes(3.0, list(resumed.recent)).bound < math.inf


def test_a_spike_is_skipped_and_not_learnt_from(make: Callable[..., Guard]) -> None:
    engine = Fp16Engine(fp16=False)
    guard = make(engine)
    for step in range(1, 21):
        take(guard, engine, step, 2.0 + 0.1 * (step % 2))
    bound = guard.spikes.bound
    take(guard, engine, 21, 5.0)
    assert not engine.applied
    assert guard.spikes.bound == bound
    take(guard, engine, 22, 2.1)
    assert engine.applied


def test_a_spike_leads_back_only_where_there_is_a_checkpoint(make: Callable[..., Guard]) -> None:
    engine = Fp16Engine(fp16=False)
    guard = make(engine, limit=9, rolls_back=True)
    for step in range(1, 21):
        take(guard, engine, step, 2.0 + 0.1 * (step % 2))
    take(guard, engine, 21, 5.0)
    guard.has_checkpoint = True
    with pytest.raises(RollBack) as caught:
        take(guard, engine, 22, 5.0)
    assert (caught.value.step, caught.value.samples_consumed) == (22, 176)
    # What is not finite tells nothing of the samples before it.
    take(guard, engine, 22, math.nan)


def test_one_bit_changes_a_digest() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = torch.randn(7, 5).to(dtype)
        before = digest(weights)
        bits = weights.view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[3, 2] ^= 1
        assert digest(weights) != before
        bits[3, 2] ^= 1
        assert digest(weights) == before
    assert digest(torch.zeros(3)) != digest(-torch.zeros(3)), "equal numbers, other bits"


def test_the_odd_rank_is_named_where_there_is_a_majority() -> None:
    assert odd_ones({0: 5, 1: 5, 2: 6, 3: 5}) == [2]
    assert odd_ones({0: 5, 2: 6}) == [0, 2]


def test_samples_by_step_and_by_number(
    altered: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    config = altered({"training.skip_samples": [[2, 3]]})
    (run_folder / "config.json").write_text(json.dumps(config))
    (run_folder / "metrics.jsonl").write_text('{"step": 2, "samples": 8, "loss": 1.0}\n')
    assert samples.main(["--run", str(run_folder), "--step", "1"]) == 0
    told = capsys.readouterr().out
    data, _ = open_data(RunConfig.model_validate(config))
    # Four samples a step, of which the third and fourth are stepped over.
    for number in (0, 1, 4, 5):
        assert f"--- sample {number}, of " in told
        assert f"tokens {data.sample(number).tolist()}" in told
    assert told.count("--- sample") == 4
    assert samples.main(["--run", str(run_folder), "--samples", "2-3"]) == 0
    assert f"tokens {data.sample(2).tolist()}" in capsys.readouterr().out
    assert samples.main(["--run", str(run_folder), "--samples", "3-"]) == 2
    assert "expected FIRST-LAST" in capsys.readouterr().err


def test_samples_are_text_where_the_tokenizer_is(
    altered: Callable[..., Any], tmp_path: Path
) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 8
    path = tmp_path / "tokenizer.model"
    train_tokenizer([text], 300, path)
    ids = load_tokenizer(path, fast=False).encode(text)
    with TokenFileWriter(tmp_path / "train", 300) as writer:
        writer.append(np.array(ids), np.array([len(ids)], np.int32))
    changes = {
        "data.train": [{"path": str(tmp_path / "train")}],
        "data.validation": str(tmp_path / "train"),
        "data.tokenizer": str(path),
        "model.vocabulary_size": 300,
    }
    data, _ = open_data(RunConfig.model_validate(altered(changes)))
    assert samples.text_of(data, 0, str(path)) in text
    assert len(samples.text_of(data, 0, str(path))) > 16


def test_samples_that_were_trained_on_cannot_be_stepped_over(altered: Callable[..., Any]) -> None:
    data, _ = open_data(RunConfig.model_validate(altered({})))
    # Trained on: 0 to 9 and 20 to 29.
    start = checkpoint.Progress(5, 20, data.fingerprint(30), 1, skipped_samples=[[10, 19]])
    require_untrained([[10, 19], [30, 40], [12, 13]], data, start)
    for ranges in ([[9, 12]], [[25, 40]], [[0, 0]]):
        with pytest.raises(ConfigError, match="trained on before step 5; continue from an earlier"):
            require_untrained(ranges, data, start)
