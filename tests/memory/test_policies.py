"""The grammar that names blocks."""

from __future__ import annotations

from typing import Any

import pytest

from configs.reading import ConfigError
from configs.schema import ActivationCheckpointing
from memory.policies import block_policies, describe_policies, named_blocks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6]),
        ("first-2", [0, 1]),
        ("last-2", [5, 6]),
        ("middle-3", [2, 3, 4]),
        ("middle-2", [2, 3]),
        ("range-1-4", [1, 2, 3]),
        ("every-3", [0, 3, 6]),
        ("every-1", [0, 1, 2, 3, 4, 5, 6]),
        ("first-7", [0, 1, 2, 3, 4, 5, 6]),
        ([4, 1], [4, 1]),
        ([], []),
    ],
)
def test_names_of_blocks(name: Any, expected: list[int]) -> None:
    assert list(named_blocks(name, 7)) == expected


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("some", "names no blocks"),
        ("first", "names no blocks"),
        ("first--1", "names no blocks"),
        ("range-3", "names no blocks"),
        ("first-8", "1 to 7"),
        ("last-0", "1 to 7"),
        ("every-0", "1 to 7"),
        ("range-3-3", "<= 7"),
        ("range-3-8", "<= 7"),
        ([7], "block 7 does not exist; blocks are 0 to 6"),
        ([-1], "block -1 does not exist"),
    ],
)
def test_names_of_no_blocks(name: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        named_blocks(name, 7)


def settings(policies: dict[str, Any], **others: Any) -> ActivationCheckpointing:
    return ActivationCheckpointing.model_validate({"policies": policies, **others})


def test_a_block_that_is_not_named_keeps_everything() -> None:
    found = block_policies(settings({"full": "first-1", "selective": [2, 3]}), 5, "cpu")
    assert found == ("full", "none", "selective", "selective", "none")
    assert block_policies(settings({}), 2, "cpu") == ("none", "none")
    assert describe_policies(found) == "full: 0; none: 1, 4; selective: 2-3"


def test_all_mistakes_are_reported_at_once() -> None:
    given = settings({"full": "first-2", "selective": "range-1-3", "none": [9], "offload": [0]})
    with pytest.raises(ConfigError) as caught:
        block_policies(given, 4, "cpu")
    key = "activation_checkpointing.policies"
    lines = caught.value.problems
    assert f"{key}.selective: block 1 is 'full' already" in lines
    assert any(line.startswith(f"{key}.none: block 9 does not exist") for line in lines)
    assert any(line.startswith(f"{key}.offload: a CPU's activations") for line in lines)
    assert block_policies(settings({"offload": [0]}), 1, "cuda") == ("offload",)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"backend": "deepspeed", "policies": {"selective": "all"}}, "has no policy 'selective'"),
        ({"backend": "torch", "reentrant": True}, "reentrant"),
        ({"backend": "fairscale"}, "backend"),
        ({"policies": {"most": "all"}}, "policies"),
        ({"policies": {"full": 3}}, "policies"),
    ],
)
def test_what_a_backend_does_not_have(given: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        ActivationCheckpointing.model_validate(given)
