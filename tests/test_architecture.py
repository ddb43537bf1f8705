"""Rules of the layout that reading alone would not keep true."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from configs.schema import (
    ActivationCheckpointing,
    Corpus,
    DataConfig,
    RunConfig,
    Stage,
    TrainingConfig,
)
from model.config import ModelConfig

ROOT = Path(__file__).parent.parent

# Who may import whom, at any depth. Nobody imports train.py.
ARROWS = {
    "data": set(),
    "model": set(),
    "configs": {"model"},
    "memory": {"model", "configs"},
    "training": {"model", "memory", "configs", "data"},
    "launch": {"model", "memory", "configs", "data", "training"},
}
PACKAGES = [*ARROWS, "benchmarks", "tests"]


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrows"
            found.append(node.module or "")
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("package", ARROWS)
def test_imports_run_one_way(package: str) -> None:
    allowed = ARROWS[package] | {package}
    own = {*PACKAGES, "train"}
    for path in sources(package):
        for name in imports(parse(path)):
            top = name.split(".")[0]
            assert top not in own or top in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_configs_take_only_sizes_and_loss_names_from_the_model() -> None:
    for path in sources("configs"):
        names = {name for name in imports(parse(path)) if name.startswith("model")}
        assert names <= {"model.config", "model.loss"}, path


@pytest.mark.parametrize("package", ["model", "data", "configs", "memory"])
def test_light_packages_do_not_import_deepspeed_at_module_level(package: str) -> None:
    for path in sources(package):
        if path == ROOT / "memory/checkpointing.py":
            continue
        top_level = [
            node for node in parse(path).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = [name for node in top_level for name in imports(node)]
        assert not any(name.split(".")[0] == "deepspeed" for name in names), path


def test_only_the_engine_and_launchers_read_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in [ROOT / "train.py", *(p for package in ARROWS for p in sources(package))]
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in ast.walk(parse(path))
        )
    }
    assert {name for name in readers if not name.startswith("launch/")} <= {"training/engine.py"}


def test_every_config_key_is_read_somewhere() -> None:
    files = [
        ROOT / "train.py",
        *(p for name in ("model", "configs", "training") for p in sources(name)),
    ]
    read = {
        node.attr
        for path in files
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    for schema in (
        RunConfig,
        DataConfig,
        Corpus,
        Stage,
        TrainingConfig,
        ActivationCheckpointing,
        ModelConfig,
    ):
        # A preset acts when the config is read: it fills the other switches.
        unread = set(schema.model_fields) - read - {"preset"}
        assert not unread, f"{schema.__name__}: {unread}"


def test_files_and_functions_stay_readable() -> None:
    for path in [ROOT / "train.py", *(p for package in ARROWS for p in sources(package))]:
        name = path.relative_to(ROOT)
        assert len(path.read_text().splitlines()) < 400, name
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{name}: {node.name}"
