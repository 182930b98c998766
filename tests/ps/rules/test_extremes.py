"""Formulas that divide by a number that may be 0: the limit is taken, and finite numbers give no NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.ps.toy_model import ToyJob

from distkeras.ps.rules import make
from distkeras.ps.rules.base import all_finite
from distkeras.ps.rules.downpour import ADAG

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

FORMS = ("4.1", "4.7", "4.10", "4.1norm", "4.7norm")


@pytest.mark.parametrize("algorithm", [11, 12, 13])
@pytest.mark.parametrize("form", ["4.1", "4.1norm"])
def test_adag_with_a_learning_rate_that_reaches_zero(form: str, algorithm: int) -> None:
    """The learning rate is 0 when the step is committed: the step is ignored where the center has moved."""
    jobs: list[ToyJob] = []

    def last_step(theta: np.ndarray, value: tuple[int, list[float]]) -> np.ndarray:
        worker, gradient = value
        if jobs:
            jobs[0].replicas[worker].learning_rate = 0.0  # the learning rate of a Keras optimizer after its last step
        return np.array(gradient)

    data = [[(0, [0.0, 0.0]), (0, [1.0, 0.0])], [(1, [0.0, 0.0]), (1, [1.0, 1.0])]]
    rule = make("adag", window=1, form=form, algorithm=algorithm)
    jobs.append(ToyJob(rule, [1.0, 2.0], data, eta=0.5, gradient=last_step))
    job = jobs[0]
    job.run([0, 1])  # the center does not move; both workers have computed their last step
    job.commit(0)
    assert job.theta.tolist() == [0.5, 2.0]
    job.commit(1)
    assert job.theta.tolist() == [0.5, 1.5 if form == "4.1" else 2.0]
    assert job.center.log.commits()["scale"].tolist() == [1.0, 1.0, 1.0, 0.5 if form == "4.1" else 0.0]


@pytest.mark.parametrize("gamma", [1e-19, 1e-23, 1e-37, 1e-60, 1e-300])
@pytest.mark.parametrize("form", FORMS[1:3] + FORMS[4:])
def test_adag_with_a_scale_that_float32_cannot_hold(form: str, gamma: float) -> None:
    """float32 gives the result of float64, even if gamma or its square is too small for float32."""
    rule = ADAG(window=1, form=form, gamma=gamma)
    _, root = rule.divisor(0.0)

    def run(dtype: Any) -> np.ndarray:
        # The last element moves so far that the next step is halved; float32 can hold the movement, not its square.
        steps = [[np.array([3.0, 0.0, 4 * root])] * 2, [np.array([1e-16, 5.0, 4 * root])] * 2]
        return ToyJob(rule, [0.0, 1.0, 0.0], steps, eta=0.25, dtype=dtype).run([0, 1, 0, 1])

    actual, expected = run(np.float32), run(np.float64)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=float(np.finfo(np.float32).tiny))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_adaptive_compensation_without_an_epsilon_is_finite(momentum: float) -> None:
    """An element whose gradients are all 0 does not change."""
    rule = make("dc_asgd", adaptive=True, epsilon=0.0, momentum=momentum)
    data = [[np.array([1.0, 0.0])] * 2, [np.array([-2.0, 0.0])] * 2]
    for dtype in (np.float32, np.float64):
        theta = ToyJob(rule, [1.0, 3.0], data, dtype=dtype).run([0, 1, 1, 0])
        assert np.isfinite(theta).all()
        assert theta[1] == 3.0
        assert theta[0] != 1.0


@pytest.mark.parametrize("algorithm", [11, 12, 13])
def test_a_model_without_parameters_has_a_scale_and_a_gap(algorithm: int) -> None:
    job = ToyJob(make("adag", window=1, algorithm=algorithm), [], [[np.empty(0)]], measure_gap=True)
    job.commit(0)
    assert job.center.log.commits()[["scale", "gap"]].tolist() == [(0.0 if algorithm == 13 else 1.0, 0.0)]


@given(st.lists(st.floats(width=32), max_size=40).map(lambda values: np.array(values, np.float32)))
@example(np.array([3e38, -3e38], np.float32))
@example(np.array([0x7FA00000], np.uint32).view(np.float32))  # a signaling NaN
def test_all_finite_equals_the_test_of_each_number(vector: np.ndarray) -> None:
    assert all_finite(vector) == np.isfinite(vector).all()
