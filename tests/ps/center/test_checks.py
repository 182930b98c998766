"""The checks of a commit before it is applied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ps.frames import some_commit

from distkeras.ps.center.center import Center
from distkeras.ps.center.checks import check_shapes, not_finite
from distkeras.ps.errors import ShapeError
from distkeras.ps.rules import make

ONES = np.ones(3, np.float32)
STATISTICS = np.ones(2, np.float32)


def center_of() -> Center:
    return Center(make("downpour"), np.zeros(3, np.float32), workers=1, moving_statistics=np.zeros(2, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["part", "statistics"])
def test_a_number_that_is_not_finite_is_detected(bad: float, where: str) -> None:
    part, statistics = ONES.copy(), STATISTICS.copy()
    (part if where == "part" else statistics)[1] = bad
    error = not_finite(some_commit(part, moving_statistics=statistics), [part])
    assert error is not None
    assert f"a commit holds {bad} in element 1 (1 such elements)" in error.message
    assert not_finite(some_commit(ONES, moving_statistics=STATISTICS), [ONES]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": (ONES, ONES)},
        {"parts": (np.ones(4, np.float32),)},
        {"packed": (np.ones(3, np.uint8),)},
        {"moving_statistics": ONES},
        {"history": np.zeros((2, 3))},
        {"history": np.zeros((1, 1))},
        {"last": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_part_of_a_wrong_shape_is_refused(wrong: dict[str, Any]) -> None:
    valid: dict[str, Any] = {"parts": (ONES,), "moving_statistics": STATISTICS, "history": np.zeros((1, 3))}
    check_shapes(center_of(), some_commit(**valid))
    with pytest.raises(ShapeError):
        check_shapes(center_of(), some_commit(**valid | wrong))
