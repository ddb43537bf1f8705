"""The C++ extension of DeepSpeed's CPU optimizers, compiled before anything depends on it.

Left to itself, DeepSpeed compiles it inside the optimizer's constructor, on all ranks at once, and
what a user sees of a failure is the destructor of an optimizer that never was.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.ops import adagrad, adam, lion, op_builder
from torch.utils import cpp_extension

from configs.checks import implementation

BUILDERS = {
    adam.DeepSpeedCPUAdam: op_builder.CPUAdamBuilder,
    adagrad.DeepSpeedCPUAdagrad: op_builder.CPUAdagradBuilder,
    lion.DeepSpeedCPULion: op_builder.CPULionBuilder,
}


class BuildError(RuntimeError):
    """An extension cannot be compiled or loaded on a host; says why and what to do."""


def load_optimizer(section: dict[str, Any], rank_on_host: int) -> None:
    """Compile and load what the optimizer of a resolved section needs; a collective call.

    One rank of each host compiles, then the others load: torch's own lock keeps two builds apart,
    but a rank that waits for it does not learn that the build has failed.

    Raises:
        BuildError: on every rank, if it fails on any.
    """
    kind, params = section["optimizer"]["type"], section["optimizer"]["params"]
    optimizer = implementation(kind, params, section)
    if optimizer not in BUILDERS:
        return
    builder = BUILDERS[optimizer]()
    for first in (True, False):
        reason = _load(builder) if (rank_on_host == 0) == first else None
        reasons: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reasons, reason)
        for reason in filter(None, reasons):
            other = ", or set deepspeed.optimizer.params.torch_adam to true"
            raise BuildError(
                f"deepspeed.optimizer: {optimizer.__name__} is compiled on first use, and {reason}"
                + (other if optimizer is adam.DeepSpeedCPUAdam else "")
            )


def _load(builder: Any) -> str | None:
    """What went wrong, and what to do about it."""
    if installed_ops.get(builder.name):  # compiled when DeepSpeed was installed
        builder.load()
        return None
    try:
        folder = Path(cpp_extension._get_build_directory(builder.name, False))
        if not (folder / f"{builder.name}.so").exists():
            if missing := _missing_tool():
                return missing
            print(f"compiling {builder.name} in {folder}: a minute or two, once", flush=True)
        if (folder / "lock").exists():  # a build that was killed leaves it behind
            print(f"waiting for {folder}/lock; delete it if nothing compiles", flush=True)
        builder.load(verbose=False)
    except OSError as error:
        return (
            f"{error.filename} cannot be written ({error.strerror}): set TORCH_EXTENSIONS_DIR to a "
            "folder that can"
        )
    except ImportError as error:
        return f"what was compiled cannot be loaded ({error}): delete {folder}"
    except (RuntimeError, subprocess.SubprocessError) as error:
        reason = _missing_tool()
        return reason or f"that failed ({_telling(str(error))}): see `ninja -v` in {folder}"
    return None


def _missing_tool() -> str | None:
    if not cpp_extension.is_ninja_available():
        return "ninja is not on the PATH: activate the environment, or pip install ninja"
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r} on the PATH: install g++, or set CXX"
    return None


def _telling(output: str) -> str:
    """The line of a compiler's output that says most."""
    lines = output.strip().splitlines()
    return next((x for x in lines if "error:" in x or "not found" in x), lines[-1]).strip()
