"""Damage to each file of a real checkpoint of two ranks is found by name, one file at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig
from training import store
from training.checkpoint import Search, verify_alone

DAMAGE: dict[str, Callable[[Path], None]] = {
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a bit flipped": lambda path: flip_in_the_middle(path),
    "removed": lambda path: path.unlink(),
}


def flip_in_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_any_damage_leads_to_the_checkpoint_before(
    altered: Callable[..., Any], command: Any
) -> None:
    changes = {"deepspeed.zero_optimization.stage": 2, "training.save_interval": 1}
    config = altered({**changes, "training.max_steps": 2, "deepspeed.scheduler": ...})
    done = command.train(config, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoints = Path(config["training"]["run_folder"]) / "checkpoints"
    before, newest = (checkpoints / store.name_of(step) for step in (1, 2))
    whole = shutil.copytree(newest, checkpoints / "whole")
    files = sorted(path.name for path in whole.iterdir())
    shards = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    assert files == [store.MANIFEST, "mp_rank_00_model_states.pt", *shards]
    for name in files:
        for kind, damage in DAMAGE.items():
            damage(newest / name)
            search = Search(checkpoints.parent)
            search.run(RunConfig.model_validate(config), verify_alone)
            assert search.found == before, (name, kind)
            assert search.refused[newest].startswith(f"{name}: "), (name, kind)
            shutil.copyfile(whole / name, newest / name)
    search = Search(checkpoints.parent)
    search.run(RunConfig.model_validate(config), verify_alone)
    assert search.found == newest
