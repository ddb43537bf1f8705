"""Files that would run code are refused, whichever way they are loaded."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from training.unpickling import Refused, load_states, values_only


class Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_pickle_that_runs_a_command_is_refused_and_runs_nothing(
    tmp_path: Path, form: str, nested: bool
) -> None:
    path, trace = tmp_path / "states.pt", tmp_path / "ran"
    state: Any = Runs(f"touch {trace}")
    if nested:
        scaler = LossScaler()
        scaler.cur_scale = state  # within a class that is let through
        state = {"optimizer_state_dict": {"loss_scaler": scaler}}
    if form == "pickle":
        path.write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(Refused, match=r"states\.pt: refused.*system"):
        load_states(path)
    with values_only(), pytest.raises(Refused):
        torch.load(path, map_location="cpu", weights_only=False)
    assert not trace.exists()
    torch.load(path, weights_only=False) if form != "pickle" else pickle.loads(path.read_bytes())
    assert trace.exists(), "the file is really one that runs"


def test_what_deepspeed_saves_comes_back(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2.0**9, 100, 1.0, 2, False)
    scaler.cur_iter = 7
    states = {
        "loss_scaler": scaler,
        "zero_stage": ZeroStageEnum.gradients,
        "slices": {"weight": fragment_address(4, 8)},
        "bf16": torch.arange(5, dtype=torch.bfloat16),
        "lr": 0.1,
        "none": None,
    }
    torch.save(states, tmp_path / "states.pt")
    loaded = load_states(tmp_path / "states.pt")
    assert vars(loaded.pop("loss_scaler")) == vars(states.pop("loss_scaler"))
    assert torch.equal(loaded.pop("bf16"), states.pop("bf16"))
    assert loaded == states


def test_a_file_that_is_no_pickle_is_named(tmp_path: Path) -> None:
    (tmp_path / "states.pt").write_bytes(b"nothing that torch knows")
    with pytest.raises(Refused, match=r"states\.pt"):
        load_states(tmp_path / "states.pt")
