"""JSON files, `--set` overrides, and their mistakes in words, for any pydantic schema."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError


class ConfigError(ValueError):
    """One or more mistakes in a run's configuration, each a line that names its key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file; a mistake is named with its line and column."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"{path}: cannot read the config: {reason}"]) from None
    try:
        raw = _parse_json(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ConfigError([f"{path}: not valid JSON at {where}: {error.msg}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: expected a JSON object, found a {type(raw).__name__}"])
    return raw


def _parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated = {key for key in keys if keys.count(key) > 1}
        if repeated:
            raise ValueError(f"key given twice: {', '.join(sorted(repeated))}")
        return dict(pairs)

    def number(text: str) -> int | float:
        # 5e8 is how DeepSpeed's bucket sizes are written: an integer in exponent notation.
        value = float(text)
        return int(value) if "e" in text.lower() and value.is_integer() else value

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    return json.loads(text, object_pairs_hook=unique, parse_float=number, parse_constant=refuse)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one key of `raw`, as in "training.seed=1"; values are JSON, bare words strings.

    Raises:
        ConfigError: it is not KEY=VALUE, or leads through something that is no section.
    """
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError([f"--set {override}: expected KEY=VALUE, as in training.seed=1"])
    try:
        value = _parse_json(text)
    except ValueError:
        value = text  # a bare word is a string, so that paths need no quotes
    *parents, last = key.split(".")
    node: Any = raw
    for depth, name in enumerate([*parents, last]):
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                place = ".".join(parents[:depth])
                raise ConfigError([f"--set {override}: {place} has {len(node)} entries, no {name}"])
            index: Any = int(name)
        elif isinstance(node, dict):
            index = name
        else:
            raise ConfigError([f"--set {override}: {'.'.join(parents[:depth])} is not a section"])
        if depth == len(parents):
            node[index] = value
        else:
            node = node[index] if isinstance(node, list) else node.setdefault(index, {})


def explain(error: ValidationError, schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Pydantic's errors, a line each: the dotted key, what is wrong, and the nearest real name."""
    lines = []
    for detail in error.errors():
        location = [str(part) for part in detail["loc"]]
        key = prefix + ".".join(location)
        if detail["type"] == "extra_forbidden":
            known = _field_names(schema, location[:-1])
            close = difflib.get_close_matches(location[-1], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            lines.append(f"{key}: unknown key; {hint}")
        elif detail["type"] == "missing":
            lines.append(f"{key}: missing")
        elif detail["type"] == "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message}" if key else message)
        else:
            lines.append(f"{key}: {detail['msg']}; got {json.dumps(detail['input'], default=str)}")
    return lines


def _field_names(schema: type[BaseModel], location: list[str]) -> list[str]:
    """Field names of the section at `location`, looking through lists and optional types."""
    for part in location:
        if part.isdigit():
            continue
        fields = schema.model_fields
        # Under its name or its alias: some of DeepSpeed's sections take both.
        field = fields.get(part) or next(f for f in fields.values() if f.alias == part)
        annotation = field.annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        schema = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted({field.alias or name for name, field in schema.model_fields.items()})


def flatten(node: Any, path: str = "") -> dict[str, Any]:
    """The values of nested dictionaries and lists, by dotted key."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    flat: dict[str, Any] = {}
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        flat |= flatten(value, name) if isinstance(value, dict | list) else {name: value}
    return flat
