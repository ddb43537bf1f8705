"""Which keys DeepSpeed reads, asked of the installed DeepSpeed.

Half of its sections are pydantic models, which refuse a key they do not have. The others, and the
top level, are dictionaries from which DeepSpeed takes what it knows; a misspelt key is ignored
without a word. For those, DeepSpeed's own parser is run on dictionaries that remember what they
are asked for, so that the list of keys is that of the installed version.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from configs.reading import explain

Path = tuple[str, ...]


class Recorder(dict[str, Any]):
    """A section that remembers the keys it was asked for, and the default beside each."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.asked: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:  # DeepSpeed writes `key in section.keys()`
        return self


def section_problems(section: Mapping[str, Any]) -> list[str]:
    """Keys that DeepSpeed does not have and values that its parser does not take, all of them."""
    known = keys_read((), {})
    lines = _unknown_keys((), section, known)
    named = {line.partition(":")[0] for line in lines}
    for key, value in section.items():
        if key not in known or f"deepspeed.{key}" in named:
            continue
        if isinstance(value, dict):
            lines += _values_of((key,), value) + _parser_refuses(key, value)
        elif is_section(key):
            lines.append(f"deepspeed.{key}: expected an object {{...}}, got {value!r}")
        else:
            lines += _parser_refuses(key, value)
    return lines


def whole_problems(section: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed's parser says of keys that contradict each other, batch sizes left aside."""
    batch = ("train_batch_size", "gradient_accumulation_steps")
    try:
        _parse({key: value for key, value in section.items() if key not in batch})
    except Exception as error:
        return [f"deepspeed: DeepSpeed refuses the configuration: {error}"]
    return []


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the name that was probably meant, letter case aside."""
    spelling = {key.lower(): key for key in known}
    close = difflib.get_close_matches(name.lower(), spelling, n=1)
    if close:
        return f"did you mean {spelling[close[0]]!r}?"
    return f"known: {', '.join(sorted(spelling.values()))}"


def keys_read(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys DeepSpeed asks for in the section at `path`, each with its default."""
    recorder = Recorder(given)
    with contextlib.suppress(Exception):  # what it refuses is reported elsewhere
        _parse(_nested(path, recorder) if path else recorder)
    return recorder.asked


def _parse(section: dict[str, Any]) -> None:
    """DeepSpeed's parser. It raises what it pleases: assertions, KeyError, TypeError, its own."""
    # Imported here: it takes seconds, and a config can be read without it.
    from deepspeed.runtime.config import DeepSpeedConfig

    # What other keys need beside them: the low-precision states are refused at ZeRO stage 0.
    section.setdefault("train_micro_batch_size_per_gpu", 1)
    section.setdefault("zero_optimization", {"stage": 1})
    DeepSpeedConfig(section)


def _nested(path: Path, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def is_section(key: str) -> bool:
    """Whether DeepSpeed looks for keys in it."""
    return bool(keys_read((key,), {})) or _refuses_unknown_keys((key,))


def _refuses_unknown_keys(path: Path) -> bool:
    try:
        _parse(_nested(path, {"no such key": None}))
    except ValidationError:
        return True
    except Exception:
        return False
    return False


def _values_of(path: Path, block: dict[str, Any]) -> list[str]:
    """Unknown keys and untrue booleans of a section that is a dictionary to DeepSpeed as well."""
    if _refuses_unknown_keys(path):
        return _model_refuses(path, block) if len(path) > 1 else []
    known = keys_read(path, block)
    if not known:
        return []
    lines = _unknown_keys(path, block, known)
    for key, value in block.items():
        if isinstance(value, dict) and key in known:
            lines += _values_of((*path, key), value)
    return lines


def _unknown_keys(path: Path, block: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in block.items():
        name = ".".join(("deepspeed", *path, key))
        if key not in known:
            hint = nearest(key, known)
            lines.append(f"{name}: unknown key, which DeepSpeed ignores silently; {hint}")
        elif isinstance(known[key], bool) and not isinstance(value, bool | dict):
            lines.append(
                f"{name}: expected true or false, got {value!r}; DeepSpeed does not check the "
                'type, and "false" in quotes is true to it'
            )
    return lines


def _parser_refuses(key: str, value: Any) -> list[str]:
    """What DeepSpeed's parser says to this key alone, so that one mistake does not hide another."""
    if key in ("train_batch_size", "gradient_accumulation_steps") or value == "auto":
        return []
    return _model_refuses((key,), value)


def _model_refuses(path: Path, value: Any) -> list[str]:
    name = ".".join(("deepspeed", *path))
    try:
        _parse(_nested(path, copy.deepcopy(value)))
    except ValidationError as error:
        if not _refuses_unknown_keys(path):
            return []  # of a model further down, which is checked by itself
        # The monitors are parsed as one model whose fields are sections of the top level.
        own = all(detail["loc"][:1] == path[-1:] for detail in error.errors())
        return _explained(error, name.removesuffix(path[-1]) if own else f"{name}.")
    except Exception as error:
        # DeepSpeed gives up at the first such mistake; each key by itself shows them all.
        keys = value if isinstance(value, dict) and len(value) > 1 else {}
        lines = [line for key in keys for line in _model_refuses(path, {key: value[key]})]
        return lines or [f"{name}: DeepSpeed refuses it: {error}"]
    return []


def _explained(error: ValidationError, prefix: str) -> list[str]:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models: list[type[BaseModel]] = DeepSpeedConfigModel.__subclasses__()
    return explain(error, next(m for m in models if m.__name__ == error.title), prefix)
