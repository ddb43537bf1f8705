"""Many small trainings in one launch: starting DeepSpeed costs more than they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def train_all(command: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train configurations, by name, in one launch; their results by name."""

    def train(configs: dict[str, Any], ranks: int) -> dict[str, Any]:
        given, written = tmp_path / "configs.json", tmp_path / "results.json"
        given.write_text(json.dumps(configs))
        worker = str(Path(__file__).with_name("parity_worker.py"))
        # Handing work of this size to a second thread costs more than it saves.
        env = {"OMP_NUM_THREADS": "1"}
        done = command.python(worker, str(given), str(written), ranks=ranks, env=env, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        results: dict[str, Any] = json.loads(written.read_text())
        assert results.keys() == configs.keys()
        return results

    return train
