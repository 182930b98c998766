"""Overlap: a worker computes while its commit is in flight, over real sockets, some of which are cut."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.patience import patience
from support.present import present
from support.ps.running_server import SIZE, Running
from support.ps.toy_model import toy_client

from distkeras.ps.center.center import Released
from distkeras.ps.errors import NonFiniteError
from distkeras.ps.rules import make
from distkeras.ps.worker.loop import run_worker

#: The center of one worker is a power of two after each step, and therefore exact in float32.
STEPS = 12


def halving(theta: np.ndarray, value: int) -> np.ndarray:
    return theta


@pytest.mark.parametrize("window", [1, 3])
def test_overlap_with_one_worker_is_sequential_sgd(window: int) -> None:
    with Running(make("downpour", window=window), workers=1, start=np.ones(SIZE)) as running:
        assert running.train(0, [0] * STEPS, eta=0.5, gradient=halving, overlap=True).ended() is None
        center = running.driver.center().center
    np.testing.assert_array_equal(center, np.full(SIZE, 0.5**STEPS, np.float32))


def test_the_next_window_begins_before_the_commit_is_applied() -> None:
    second_window_began = threading.Event()
    counter = itertools.count(1)

    def gradient(theta: np.ndarray, value: int) -> np.ndarray:
        if next(counter) == 2:
            second_window_began.set()
        return theta

    with Running(make("downpour"), workers=1, start=np.ones(SIZE)) as running:
        release, server = present(running.server.center).release, running.server

        def release_after_second_window(
            worker: int, attempt: int, wants: Sequence[np.ndarray] = (), outs: Sequence[np.ndarray | None] = ()
        ) -> Released:
            # The first commit is applied, and its reply waits, under the server's lock, for the second window.
            if present(server.center).clock == 1:
                assert second_window_began.wait(patience(20))
            return release(worker, attempt, wants, outs)

        present(running.server.center).release = release_after_second_window
        assert running.train(0, [0, 0], eta=0.5, gradient=gradient, overlap=True).ended() is None
        assert running.driver.observe(1, patience(5)).clock == 2


@pytest.mark.parametrize("step", [2, 5, STEPS])
def test_a_posted_commit_survives_a_cut_connection(step: int) -> None:
    counter = itertools.count(1)
    clients: list[Any] = []

    def gradient(theta: np.ndarray, value: int) -> np.ndarray:
        if next(counter) == step:
            clients[0].channel.hang_up()
        return theta

    with Running(make("downpour", window=2), workers=1, start=np.ones(SIZE)) as running:
        client, welcome, begin = toy_client(
            running.address, running.rule, [0] * STEPS, worker=0, size=SIZE, eta=0.5, gradient=gradient, overlap=True
        )
        clients.append(client)
        run_worker(client, welcome, begin)
        np.testing.assert_array_equal(running.driver.center().center, np.full(SIZE, 0.5**STEPS, np.float32))
        assert running.driver.observe(0, patience(5)).batches == STEPS


@pytest.mark.parametrize("step", [2, 4], ids=["of a middle commit", "of the last commit"])
def test_the_error_for_bad_numbers_in_a_posted_commit_names_its_step(step: int) -> None:
    values = [0.0] * 5
    values[step] = np.nan
    with Running(make("downpour"), workers=1) as running:
        error = running.train(0, values, gradient=lambda t, v: t + v, overlap=True).ended()
        assert isinstance(error, NonFiniteError)
        assert (error.worker, error.step) == (0, step)


def test_the_loop_continues_after_a_skipped_commit() -> None:
    values = [1.0, 2.0, np.nan, 4.0, 8.0, 16.0]
    with Running(make("downpour"), workers=1, max_skipped=1) as running:
        assert running.train(0, values, eta=1.0, overlap=True).ended() is None
        np.testing.assert_array_equal(running.driver.center().center, np.full(SIZE, -31.0, np.float32))


def test_an_error_of_training_waits_for_the_posted_commit() -> None:
    counter = itertools.count(1)

    def gradient(theta: np.ndarray, value: int) -> np.ndarray:
        if next(counter) == 3:
            raise ZeroDivisionError("an error of the user's code")
        return theta

    with Running(make("downpour"), workers=1, start=np.ones(SIZE)) as running:
        assert isinstance(
            running.train(0, [0] * 5, eta=0.5, gradient=gradient, overlap=True).ended(), ZeroDivisionError
        )
        assert running.driver.observe(1, patience(5)).clock == 2  # the second commit was in flight
