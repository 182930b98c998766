"""Tests of sums over time: folding buckets loses nothing and bounds their number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkeras.dashboard.record import Buckets, Histogram, number, rounded


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=50), st.sampled_from([2, 10, 64]))
def test_every_value_is_in_the_bucket_of_its_time(times: list[float], most: int) -> None:
    buckets = Buckets({"count": 2}, most)
    for one in times:
        places = buckets.place(np.array([one]))
        buckets.add("count", 1, places, 1.0)
    sums = buckets.sums("count")
    assert sums.shape == (2, buckets.used)
    assert buckets.used <= most
    assert sums[0].sum() == 0
    expected = np.bincount((np.array(times) / buckets.width).astype(int), minlength=buckets.used)
    np.testing.assert_array_equal(sums[1], expected)


def test_the_first_changed_bucket_is_reported() -> None:
    buckets = Buckets({"count": 1}, 4)
    buckets.place(np.array([2.5, 0.5]))
    assert (buckets.used, buckets.changed) == (3, 0)
    buckets.mark_sent()
    assert (buckets.changed, buckets.folded) == (3, False)
    buckets.place(np.array([2.9, 3.0]))
    assert (buckets.used, buckets.changed) == (4, 2)
    buckets.mark_sent()
    buckets.place(np.array([4.0]))
    assert (buckets.width, buckets.used, buckets.changed, buckets.folded) == (2.0, 3, 0, True)


def test_an_empty_update_changes_nothing() -> None:
    buckets = Buckets({"count": 1}, 4)
    assert buckets.place(np.zeros(0)).tolist() == []
    assert buckets.used == 0


@given(st.lists(st.integers(0, 100_000), max_size=100))
def test_a_histogram_counts_every_value(values: list[int]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(np.array([value]))
    assert histogram.counts.sum() == len(values)
    assert len(histogram.counts) == 64
    expected = np.bincount(np.array(values, np.int64) // histogram.width, minlength=64)
    np.testing.assert_array_equal(histogram.counts, expected)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, 0.0),
        (1.0, 1.0),
        (0.123456, 0.1235),
        (12.3456, 12.35),
        (123456.7, 123457.0),
        (-0.00123456, -0.001235),
        (1.23456e-9, 1.235e-9),
        (float("nan"), None),
        (float("inf"), None),
    ],
)
def test_numbers_have_four_digits_and_are_valid_json(value: float, shown: float | None) -> None:
    assert number(value) == shown
    assert rounded(np.array([[value, 1.0]])) == [[shown, 1.0]]


def test_a_tiny_number_is_rounded_to_a_near_number() -> None:
    assert number(1.23456789e-30) == pytest.approx(1.23456789e-30, rel=1e-3)
