"""Work that moves in a simulation: how long a job lasts, and that each mini-batch counts once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from support.cases import examples

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import SlowWorkers
from distkeras.ps.simulation.virtual_job import Trace


def train(
    batches: list[int], *, lends: bool, rule: Any = None, slow: int = 0, seed: int = 0
) -> tuple[Trace, Counter[Any]]:
    """Run a job whose steps take a second, four of a slow worker; count the gradients."""
    computed = Counter[Any]()

    def gradient(theta: np.ndarray, worker: int, batch: int) -> np.ndarray:
        computed[worker, batch] += 1
        return np.ones_like(theta)

    share = slow / len(batches)
    trace = simulate(
        rule or make("downpour", window=5),
        np.zeros(1),
        gradient,
        workers=len(batches),
        learning_rate=1.0,
        timing=SlowWorkers(1.0, share=share, factor=4.0, variation=1e-3),
        numbered=True,
        batches=batches,
        lends=lends,
        seed=seed,
    )
    return trace, computed


@examples(60)
@hypothesis.given(
    st.lists(st.integers(0, 120), min_size=1, max_size=5), st.integers(0, 2), st.integers(1, 7), st.integers(0, 99)
)
def test_each_mini_batch_is_trained_once(batches: list[int], slow: int, window: int, seed: int) -> None:
    rule = make("downpour", window=window)
    trace, computed = train(batches, lends=True, rule=rule, slow=min(slow, len(batches)), seed=seed)
    assert computed == {(worker, batch): 1 for worker, count in enumerate(batches) for batch in range(count)}
    assert trace.theta.tolist() == [-sum(batches)]
    assert Counter(np.repeat(trace.worker, trace.steps).tolist()) == Counter(
        {worker: count for worker, count in enumerate(batches) if count}
    )


@pytest.mark.parametrize(
    ("batches", "slow", "without", "ideal"),
    [([400] * 8, 1, 1600.0, 3200 / 7.25), ([400, 100, 100, 100], 0, 400.0, 175.0), ([400] * 4, 0, 400.0, 400.0)],
    ids=["a slow worker", "a large partition", "in balance"],
)
def test_a_job_lasts_little_longer_than_the_mean(batches: list[int], slow: int, without: float, ideal: float) -> None:
    alone, lent = (train(batches, lends=lends, slow=slow)[0] for lends in (False, True))
    assert alone.time[-1] == pytest.approx(without, rel=0.02)
    assert lent.time[-1] == pytest.approx(ideal, rel=0.1)


def test_without_a_helper_nothing_changes() -> None:
    one, other = (train([100], lends=lends)[0] for lends in (False, True))
    np.testing.assert_array_equal(one.time, other.time)
    np.testing.assert_array_equal(one.steps, other.steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": [3]}, "`batches` must have a number for each of 2 workers"),
        ({"batches": [3, -1]}, "`batches` must have a number for each of 2 workers"),
        ({"lends": True}, "`lends` must come with `batches`"),
        ({"lends": True, "batches": [3, 3], "rule": "easgd"}, "`lends` must come with `batches` and a rule"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"rule": "downpour", "steps": 5, "workers": 2, "learning_rate": 0.1} | options
    with pytest.raises(ConfigurationError, match=message):
        simulate(theta0=np.zeros(1), gradient=lambda *_: np.ones(1), timing=SlowWorkers(), **given)
