"""What error messages and logs say about memory that ran out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

Kind = Literal["device", "shared_memory", "host", "host_killed"]

SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)"
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

# The first kind that a line matches is its kind. Case matters: DeepSpeed's launcher names its
# sigkill_handler whenever a rank ends.
KINDS: dict[Kind, str] = {
    "device": r"(CUDA|HIP) (error: )?out of memory|Cuda failure.*out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED",
    "shared_memory": r"[Bb]us error|(out of|insufficient) shared memory|return code = -7\b"
    r"|exitcode\s*: -7\b|unable to (mmap|write to|open|allocate).*</torch_",
    "host": r"DefaultCPUAllocator: (can't allocate|not enough) memory|\bMemoryError\b"
    r"|std::bad_alloc|Cannot allocate memory",
    "host_killed": r"return code = -9\b|exitcode\s*: -9\b|Signal 9 \(SIGKILL\) received|\bKilled\b"
    r"|oom[-_]kill",
}


@dataclass(frozen=True)
class Figures:
    """Bytes, each None where the message does not say; on a GPU, of that GPU."""

    kind: Kind | None = None
    """None: the text is about something else."""
    requested: int | None = None
    allocated: int | None = None
    """By tensors, in torch's allocator."""
    reserved: int | None = None
    """By torch's allocator: `allocated`, and what it keeps to give out again."""
    free: int | None = None
    capacity: int | None = None
    process: int | None = None
    """By this process, what torch's allocator does not know of included."""
    others: int | None = None
    """By other processes."""


def read_message(text: str) -> Figures:
    """The figures of an out-of-memory message by torch (1.x to 2.13), Python or a launcher."""
    kind = kind_of(text)
    if kind is None:
        return Figures()
    capacity = _size(text, rf"{SIZE} total capacity", rf"total capacity of {SIZE}")
    allocated = _size(text, rf"{SIZE} already allocated", rf"{SIZE} is allocated by PyTorch")
    reserved = _size(text, rf"{SIZE} reserved in total", rf"{SIZE} cached")
    unallocated = _size(text, rf"{SIZE} is reserved by PyTorch but unallocated")
    if unallocated is not None and allocated is not None:
        reserved = allocated + unallocated
    process, others = _processes(text, capacity, reserved)
    return Figures(
        kind,
        requested=_size(text, rf"[Tt]ried to allocate {SIZE}", rf"Unable to allocate {SIZE}"),
        allocated=allocated,
        reserved=reserved,
        free=_size(text, rf"{SIZE} free", rf"{SIZE} is free"),
        capacity=capacity,
        process=process,
        others=others,
    )


def kind_of(text: str) -> Kind | None:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), None)


def _size(text: str, *patterns: str) -> int | None:
    """Bytes of the first pattern that is found."""
    matches = (re.search(pattern, text) for pattern in patterns)
    match = next((match for match in matches if match), None)
    return None if match is None else _bytes(match[1], match[2])


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * UNITS[unit])


def _processes(
    text: str, capacity: int | None, reserved: int | None
) -> tuple[int | None, int | None]:
    """Bytes of this process and of the others, where the driver's list tells them apart."""
    found = re.findall(rf"(this process|Process \d+) has {SIZE} memory in use", text)
    sizes = [(name == "this process", _bytes(number, unit)) for name, number, unit in found]
    # A driver that does not know (in WSL, for one) says 2^64 - 1 bytes.
    sizes = [(own, size) for own, size in sizes if capacity is None or size <= capacity]
    if not sizes:
        return None, None
    if not any(own for own, _ in sizes):
        # In a container the driver's process ids are not this one's: it holds what torch reserves.
        large = sorted(size for _, size in sizes if reserved is not None and size >= reserved)
        if not large:
            return None, None
        sizes.remove((False, large[0]))
        sizes.append((True, large[0]))
    return sum(s for own, s in sizes if own), sum(s for own, s in sizes if not own)


class Found(NamedTuple):
    """An out-of-memory message in a log."""

    message: str
    moment: str
    """What the traceback before it was doing, as in "loss forward"; "" where there is none."""
    rank: int | None


def find_message(log: str) -> Found | None:
    """The last out-of-memory message of a log, which may be of several ranks."""
    lines = log.splitlines()
    numbers = [number for number, line in enumerate(lines) if kind_of(line)]
    if not numbers:
        return None
    prefix = re.match(r"\s*\[(?:default|rank)(\d+)\]:\s?", lines[numbers[-1]])
    own = [
        line[prefix.end() :] if prefix else line
        for line in lines[: numbers[-1] + 1]
        if not prefix or line.startswith(prefix[0].rstrip())
    ]
    starts = [n for n, line in enumerate(own) if "Traceback (most recent call last)" in line]
    frames = own[starts[-1] : -1] if starts else []
    return Found(own[-1].strip(), moment_of(frames), int(prefix[1]) if prefix else None)


# In the order in which they decide: a loss is computed inside a forward pass, a recomputation
# inside a backward pass. Each: names of functions, and what a file's name or a line of code has.
MOMENTS: tuple[tuple[str, str, str], ...] = (
    ("checkpoint save", "save_checkpoint save_pretrained save_16bit_model", r"\bsave\("),
    ("checkpoint load", "load_checkpoint load_state_dict", r"torch\.load\("),
    (
        "loss forward",
        "cross_entropy next_token_loss",
        r"loss\w*\.py$|cross_entropy|logits\b.*\.float\(",
    ),
    ("optimizer step", "step _optimizer_step", r"/optim/|optimizers?\.py$"),
    ("backward", "backward _engine_run_backward", r"\.backward\("),
    ("evaluation", "evaluate validation_loss", r"evaluate\.py$"),
    ("forward", "forward _call_impl", r"modules/module\.py$"),
    ("initialisation", "initialize build_engine to_empty", r"deepspeed\.initialize\("),
)


def moment_of(frames: Sequence[str]) -> str:
    """What a traceback's lines were doing when memory ran out; "" where they do not tell."""
    functions: set[str] = set()
    code: list[str] = []
    for line in frames:
        match = re.match(r'\s*File "(.+)", line \d+, in (\S+)', line)
        if match:
            functions.add(match[2])
            code.append(str(PurePosixPath(match[1].replace("\\", "/"))))
        else:
            code.append(line.strip())
    for moment, names, pattern in MOMENTS:
        if functions & set(names.split()) or any(re.search(pattern, text) for text in code):
            return moment
    return ""


@dataclass(frozen=True)
class Cgroup:
    """What a container or a batch system lets this process's group have."""

    limit: int | None
    """Bytes of main memory; None: unlimited."""
    kills: int
    """Processes that the kernel has killed for it so far."""


def read_cgroup(root: Path, membership: str) -> Cgroup | None:
    """The tightest limit on this process's main memory; None where there are no control groups.

    Args:
        root: where control groups are mounted, /sys/fs/cgroup.
        membership: the text of /proc/self/cgroup.
    """
    found: list[Cgroup] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree
            found += _limits(root, path, "memory.max", "memory.events")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.oom_control"
            found += _limits(root / "memory", path, *files)
    if not found:
        return None
    limits = [group.limit for group in found if group.limit is not None]
    return Cgroup(min(limits, default=None), max(group.kills for group in found))


def _limits(root: Path, path: str, limit_file: str, kills_file: str) -> Iterable[Cgroup]:
    """Of a group and its parents: any of them may be the one that has a limit.

    In a container the group's own folder is often mounted as the root, and `path` is not there.
    """
    folder = root / path.strip("/")
    for group in [folder, *folder.parents]:
        if group.is_relative_to(root) and (group / limit_file).exists():
            limit = (group / limit_file).read_text().strip()
            events = (group / kills_file).read_text() if (group / kills_file).exists() else ""
            kills = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
            # Version 1 writes "unlimited" as a number of pages near 2^63 bytes.
            unlimited = limit == "max" or int(limit) >= 2**60
            yield Cgroup(None if unlimited else int(limit), int(kills[1]) if kills else 0)
