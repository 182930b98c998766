"""Tables of which only touched rows exist: their initial rows, and the index of the rows that exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.tables import RowIndex, TableShape, initial_rows

LARGEST = (1 << 63) - 1
HUGE = TableShape("users", LARGEST, 3, 8, seed=7, scale=0.5)
numbers = st.integers(0, 40) | st.integers(0, LARGEST - 1)


def mixed(bits: int) -> int:
    """Return SplitMix64's finalizer, computed with Python integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ bits >> shift) * factor % 2**64
    return bits ^ bits >> 31


def number(seed: int, row: int, column: int, scale: float) -> np.float32:
    step = 0x9E3779B97F4A7C15
    key = mixed((mixed(seed) + step * (row + 1)) % 2**64)
    fraction = (mixed((key + step * (column + 1)) % 2**64) >> 40) / 2**23 - 1
    return np.float32(fraction) * np.float32(scale)


@given(st.lists(numbers, min_size=1, max_size=20), st.integers(0, LARGEST), st.sampled_from([0.05, 1.0, 3.0]))
def test_an_initial_row_depends_only_on_the_seed_and_its_number(rows: list[int], seed: int, scale: float) -> None:
    shape = TableShape("users", LARGEST, 3, 8, seed=seed, scale=scale)
    found = initial_rows(shape, np.array(rows))
    expected = [[number(seed, row, column, scale) for column in range(3)] for row in rows]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    assert np.abs(found).max() <= scale


def test_the_initial_rows_of_a_seed_do_not_change_between_versions() -> None:
    found = initial_rows(HUGE, np.array([0, 1, LARGEST - 1]))
    expected = [
        [0.23578500747680664, 0.4287106394767761, 0.04822784662246704],
        [0.27742964029312134, 0.4094806909561157, -0.017997801303863525],
        [-0.4143240451812744, -0.047436296939849854, 0.12785285711288452],
    ]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    assert not initial_rows(TableShape("users", 9, 2, 2, seed=1), np.arange(9)).any()


def test_initial_numbers_are_spread_evenly() -> None:
    flat = initial_rows(HUGE, np.arange(100_000)).reshape(-1)
    counts, _ = np.histogram(flat, bins=50, range=(-0.5, 0.5))
    assert counts.sum() == 300_000
    # The statistic has a chi-squared distribution with 49 degrees of freedom.
    assert ((counts - 6000) ** 2 / 6000).sum() < 100


@given(st.lists(st.lists(numbers, max_size=700, unique=True), max_size=6))
def test_an_index_finds_what_was_added(groups: list[list[int]]) -> None:
    index, expected = RowIndex(), dict[int, int]()
    for group in groups:
        ids = np.array(group, np.int64)
        np.testing.assert_array_equal(index.find(ids), [expected.get(row, -1) for row in group])
        new = np.array([row for row in group if row not in expected], np.int64)
        places = index.add(new)
        np.testing.assert_array_equal(places, np.arange(len(expected), len(expected) + len(new)))
        expected.update(zip(new.tolist(), places.tolist(), strict=True))
        np.testing.assert_array_equal(index.find(ids), [expected[row] for row in group])
    assert len(index) == len(expected)


def test_an_index_grows_with_the_rows_and_not_with_their_numbers() -> None:
    index = RowIndex()
    for first in range(0, 100_000, 1000):
        index.add((np.arange(first, first + 1000) + 1) * 10**13)
    assert index.nbytes <= 16 * 4 * 100_000
    assert (index.find((np.arange(100_000) + 1) * 10**13) == np.arange(100_000)).all()


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"seed": LARGEST + 1}, {"scale": -1.0}, {"scale": np.inf}, {"rows": LARGEST + 1}]
)
def test_an_invalid_shape_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    shape: dict[str, Any] = {"name": "users", "rows": 9, "width": 2, "most": 2, "seed": 0}
    with pytest.raises(ConfigurationError, match=f"`{name}` must be"):
        TableShape(**(shape | wrong))
