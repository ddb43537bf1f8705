from __future__ import annotations

import hashlib
import itertools
import math
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import MAX_BLEND_PERIOD, Mix, exact_weights, fair_order, permute


def one_by_one(k: int, size: int, key: str) -> int:
    """The published construction in Python's integers, which do not overflow."""

    def mix(x: int) -> int:
        mask = (1 << 64) - 1
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    digest = hashlib.blake2b(key.encode(), digest_size=64).digest()
    keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8)]
    while True:
        left, right = divmod(k, b)
        for i in range(0, 8, 2):
            left = (left + mix(right ^ keys[i])) % a
            right = (right + mix(left ^ keys[i + 1])) % b
        k = left * b + right
        if k < size:
            return k


def images(numbers: range, size: int, key: str) -> list[int]:
    found: list[int] = permute(np.array(numbers), size, key).tolist()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 23, 1000, 4097, 65_536])
def test_permutation_is_a_bijection(size: int) -> None:
    for key in ("a", "b"):
        assert sorted(images(range(size), size, key)) == list(range(size))


@pytest.mark.parametrize("size", [10**12, 2**62 - 57, 10**12 + 39])
def test_permutation_of_large_ranges(size: int) -> None:
    ends = [*range(1000), *range(size - 1000, size)]
    found = set(permute(np.array(ends), size, "x").tolist())
    assert len(found) == 2000
    assert all(0 <= image < size for image in found)
    # Spread evenly: 2,000 points miss a tenth of the range with probability 0.9^2000.
    assert {image * 10 // size for image in found} == set(range(10))


@pytest.mark.parametrize("size", [3, 23, 10**6, 10**12 + 39, 2**62 - 57])
def test_permutation_is_the_published_one(size: int) -> None:
    numbers = [random.Random(size).randrange(size) for _ in range(200)]
    expected = [one_by_one(k, size, "key") for k in numbers]
    assert permute(np.array(numbers), size, "key").tolist() == expected


def test_permutation_looks_random() -> None:
    keys = [str(i) for i in range(600)]
    # All 6 orders of 3, about 100 times each; the bounds are five standard deviations off.
    orders = [tuple(images(range(3), 3, key)) for key in keys]
    assert all(55 < orders.count(order) < 145 for order in set(orders))
    assert len(set(orders)) == 6
    # One fixed point is expected in each; 600 +- 5 sqrt(600).
    fixed = sum(k == image for key in keys for k, image in enumerate(images(range(101), 101, key)))
    assert 478 < fixed < 722
    # Neighbours do not stay neighbours: 2 / 1000 are expected to.
    thousand = images(range(1000), 1000, "x")
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(thousand)) < 12


def test_order_is_the_same_everywhere() -> None:
    script = (
        "import numpy as np; from data.order import permute\n"
        "print(permute(np.arange(23), 23, 'key').tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    # A change of these numbers breaks the resumption of every run started before it.
    assert outputs == {str(GOLDEN)}


GOLDEN = [6, 14, 1, 22, 5, 0, 13, 16, 12, 10, 11, 8, 4, 9, 3, 18, 19, 21, 7, 17, 15, 20, 2]


def worst(order: np.ndarray, shares: list[Fraction]) -> tuple[float, float]:
    """How far a corpus' count is from its share: in a prefix, in a window of 1,000 places."""
    prefixes, windows = [], []
    for corpus in range(0, len(shares), max(1, len(shares) // 10)):  # about ten of them
        due = float(shares[corpus]) * np.arange(1, len(order) + 1)
        off = np.append(0, np.cumsum(order == corpus) - due)
        prefixes.append(np.abs(off).max())
        windows.append(np.abs(off[1000:] - off[:-1000]).max())
    return float(max(prefixes)), float(max(windows))


def test_every_prefix_of_a_period_is_fair() -> None:
    generator = random.Random(0)
    given = [[1], [1, 1], [1, 9], [3, 5, 7], [1, 1, 1, 97], [50, 1, 1, 1, 1, 1], [1] * 30]
    for _ in range(60):
        corpora = generator.randint(2, 6)
        given.append([generator.randint(1, 10 ** generator.randint(1, 2)) for _ in range(corpora)])
    for shares in given:
        order = fair_order(shares).tolist()
        period = sum(shares)
        counts = [0] * len(shares)
        for place, chosen in enumerate(order, start=1):
            counts[chosen] += 1
            for count, share in zip(counts, shares, strict=True):
                assert abs(count * period - share * place) < period
        assert counts == shares


def test_a_corpus_without_a_share_does_not_appear() -> None:
    assert set(fair_order([3, 0, 2]).tolist()) == {0, 2}
    assert fair_order([0, 4]).tolist() == [1] * 4
    assert set(Mix(exact_weights([0, 0.7, 0.3])).locate(np.arange(99))[0].tolist()) == {1, 2}


@pytest.mark.parametrize(
    "weights", [[0.7, 0.2, 0.1], [0.5, 0.3, 0.15, 0.05], [1, 1], [0.125, 0.875], [0.999, 0.001]]
)
def test_windows_of_a_thousand_are_exact_where_the_weights_have_three_decimals(
    weights: list[float],
) -> None:
    order, _ = Mix(exact_weights(weights)).locate(np.arange(20_000))
    prefix, window = worst(order, list(exact_weights(weights)))
    assert prefix < 1
    assert window < 1e-9


def random_weights() -> list[list[float]]:
    generator = random.Random(1)
    several = [[generator.random() for _ in range(generator.randint(2, 9))] for _ in range(6)]
    return [*several, [1.0] * 300, [generator.random() ** 4 for _ in range(300)]]


@pytest.mark.parametrize("weights", random_weights(), ids=lambda weights: str(len(weights)))
def test_any_weights_are_right_in_every_prefix_and_window(weights: list[float]) -> None:
    shares = exact_weights(weights)
    exact = math.lcm(*(share.denominator for share in shares)) <= MAX_BLEND_PERIOD
    order, before = Mix(shares).locate(np.arange(3 * MAX_BLEND_PERIOD + 500))
    prefix, window = worst(order, list(shares))
    bound = 1 if exact else 3
    assert prefix < bound
    assert window < 2 * bound  # the difference of two prefixes
    # Each corpus in order, none of its samples twice and none left out.
    by_corpus = np.lexsort((np.arange(len(order)), order))
    firsts = np.searchsorted(order[by_corpus], order)
    assert np.array_equal(before[by_corpus], np.arange(len(order)) - firsts[by_corpus])


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12).filter(any))
@settings(max_examples=40, deadline=None)
def test_any_whole_weights_are_exact(weights: list[int]) -> None:
    shares = exact_weights(weights)
    order, _ = Mix(shares).locate(np.arange(5000))
    assert worst(order, list(shares))[0] < 1
    period = sum(weights) // math.gcd(*weights)
    one = Mix(shares).count(np.arange(len(weights)), np.full(len(weights), 7 * period)).tolist()
    assert one == [7 * weight // math.gcd(*weights) for weight in weights]


@pytest.mark.parametrize("samples", [1, 999, 10**6 + 1, 10**9 + 7, 10**12 + 3])
def test_a_whole_run_is_right_for_weights_that_no_period_holds(samples: int) -> None:
    weights = [0.333333, 0.1234567, 0.7654321, 1e-7]
    mix = Mix(exact_weights(weights))
    corpora = np.arange(4)
    counts = mix.count(corpora, np.full(4, samples)).tolist()
    assert sum(counts) == samples
    total = sum(Fraction(str(weight)) for weight in weights)
    rounding = samples / 2**32  # what shares of 2**-32 cannot tell apart
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - samples * Fraction(str(weight)) / total) < 3 + rounding


def test_counts_are_those_of_the_order() -> None:
    for weights in ([0.7, 0.2, 0.1], [0.4142135, 1, 0.2718281]):
        mix = Mix(exact_weights(weights))
        order, _ = mix.locate(np.arange(140_000))
        for samples in (0, 1, 17, 65_535, 65_536, 70_001, 140_000):
            counted = mix.count(np.arange(3), np.full(3, samples)).tolist()
            assert counted == [int((order[:samples] == corpus).sum()) for corpus in range(3)]


def test_shares() -> None:
    assert exact_weights([0.7, 0.3]) == (Fraction(7, 10), Fraction(3, 10))
    assert exact_weights([0.1, 0.2]) == (Fraction(1, 3), Fraction(2, 3))  # not as binary fractions
    assert exact_weights([2.5e3]) == (1,)
    assert exact_weights([3_000_000_001, 1]) == (
        Fraction(3_000_000_001, 3_000_000_002),
        Fraction(1, 3_000_000_002),
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0, 0], "all zero"),
        ([1, -0.5], "not negative"),
        ([1, float("nan")], "finite"),
        ([1, float("inf")], "finite"),
    ],
)
def test_impossible_weights(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_weights(weights)
