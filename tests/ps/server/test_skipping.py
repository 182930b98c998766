"""Commits with NaN or infinity that are skipped: each is counted once, and the center does not change."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.ps.running_server import Running
from support.ps.toy_model import toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import DistkerasError, JobStoppedError, NonFiniteError, ServerLostError
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.rules import center_rules, make
from distkeras.ps.worker.loop import run_worker

SIZE = 11
#: Names of the arrays that the toy vector is made of.
LAYOUTS = (Layout(("first/kernel", "first/bias"), ((2, 4), (3,))), Layout((), ()))


def gradient_with_nan(theta: np.ndarray, value: float) -> np.ndarray:
    """Return the batch's absolute value as the gradient, with NaN in its ninth element if the value is negative."""
    gradient = np.full(theta.shape, abs(value))
    if value < 0:
        gradient[8] = np.nan
    return gradient


def train(running: Running, data: list[list[float]], eta: float = 1.0) -> list[Any]:
    """Train a worker on each list in ``data``; return the errors."""
    errors: list[DistkerasError] = []

    def run(worker: int, values: list[float]) -> None:
        try:
            client, welcome, begin = toy_client(
                running.address,
                running.rule,
                values,
                worker=worker,
                size=SIZE,
                eta=eta,
                gradient=gradient_with_nan,
                deadlines=PATIENT,
            )
            run_worker(client, welcome, begin)
            client.close()
        except DistkerasError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(data)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
        assert not thread.is_alive()
    return errors


def running(name: str, workers: int, max_skipped: int, **hyper: Any) -> Running:
    return Running(
        make(name, **hyper),
        workers=workers,
        size=SIZE,
        deadlines=PATIENT,
        eta=1.0,
        max_skipped=max_skipped,
        layouts=LAYOUTS,
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", list(center_rules()))
def test_every_rule_continues_after_a_skipped_commit(name: str) -> None:
    """This includes rounds that wait for a worker whose contribution is skipped, and rounds without contributions."""
    with running(name, 2, 10) as server:
        if not server.rule.traits.gradient:
            server.rule = make(name, window=1)
        assert train(server, [[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, 1.0, -1.0]], eta=0.1) == []
        commits = server.driver.drain().commits.view(COMMIT)
        for worker, skipped in ((0, [0, 1, 0, 1]), (1, [0, 0, 0, 1])):
            own = commits[commits["worker"] == worker]
            assert own["first_batch"].tolist() == own["last_batch"].tolist() == [0, 1, 2, 3]
            assert own["skipped"].tolist() == skipped
            assert own["sequence"].tolist() == [1, 2, 3, 4]
        applied = commits[commits["skipped"] == 0]
        assert applied["clock"].tolist() == list(range(5))
        center = server.driver.center()
        assert center.clock == 5
        assert np.isfinite(center.center).all()
        assert np.abs(center.center).max() > 0


@pytest.mark.timeout(60)
def test_a_skipped_commit_does_not_change_the_center() -> None:
    with running("downpour", 1, 1, window=1) as server:
        assert train(server, [[1.0, 2.0, -4.0, 8.0]]) == []
        np.testing.assert_array_equal(server.driver.center().center, np.full(SIZE, -11.0))


@pytest.mark.timeout(60)
def test_a_round_is_divided_by_the_number_of_contributions() -> None:
    with running("ssgd", 2, 1) as server:
        assert train(server, [[1.0, -2.0], [3.0, 5.0]]) == []
        np.testing.assert_array_equal(server.driver.center().center, np.full(SIZE, -(1.0 + 3.0) / 2 - 5.0))


@pytest.mark.timeout(60)
def test_one_skip_too_many_ends_the_job_and_names_the_array() -> None:
    with running("downpour", 1, 2) as server:
        (error,) = train(server, [[1.0, -1.0, -1.0, -1.0, 1.0]])
        assert type(error) is NonFiniteError
        assert (error.worker, error.step) == (0, 3)
        assert "nan in first/bias (element 8)" in error.message
        assert "after 2 commits that were skipped" in error.message
        with pytest.raises(NonFiniteError):
            server.driver.observe(-1, 0.0)


@pytest.mark.timeout(60)
def test_no_commit_is_skipped_by_default() -> None:
    with running("downpour", 2, 0) as server:
        errors = train(server, [[-1.0], [1.0] * 1000])
        assert {type(error) for error in errors} <= {NonFiniteError, JobStoppedError}
        assert NonFiniteError in {type(error) for error in errors}
        np.testing.assert_array_equal(server.driver.drain().commits.view(COMMIT)["skipped"], 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["downpour", "aeasgd"])
def test_a_worker_whose_reply_is_lost_does_not_take_its_skipped_commit_for_applied(name: str) -> None:
    """The welcome over the new connection reports that the commit was skipped."""
    with running(name, 1, 5, window=1) as server:
        client, welcome, begin = toy_client(
            server.address,
            server.rule,
            [1.0, -1.0, 1.0],
            worker=0,
            size=SIZE,
            eta=0.1,
            gradient=gradient_with_nan,
            deadlines=PATIENT,
        )
        began = []
        cut: list[bool] = []
        call = client.request

        def call_and_lose(message: Any, *args: Any) -> Any:
            answer = call(message, *args)
            if getattr(answer, "skipped", False) and type(message).__name__ == "Commit" and not cut:
                cut.append(True)
                client.close()
                raise ServerLostError("the answer never arrives")
            return answer

        client.request = cast(Any, call_and_lose)
        run_worker(client, welcome, lambda place: began.append(place.batch) or begin(place))
        client.close()
        assert cut == [True]
        assert began == [0, 2]
        assert server.driver.drain().commits.view(COMMIT)["skipped"].tolist() == [0, 1, 0]
