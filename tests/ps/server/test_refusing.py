"""Refused commits over real sockets: the same mini-batches again, from the center, with the residual of int8."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT
from support.ps.running_server import Running
from support.ps.toy_model import toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.protocol.compression import FORMATS, WorkerFormat
from distkeras.ps.protocol.loop import Compute
from distkeras.ps.rules import make

SIZE = 4


class Turns:
    """A worker's client and loop, which performs one exchange at a time."""

    def __init__(self, running: Running, worker: int, values: list[float], wire_format: str) -> None:
        self.taken: list[float] = []

        def gradient(theta: np.ndarray, value: float) -> np.ndarray:
            self.taken.append(value)
            return np.full(theta.shape, -value)

        self.client, welcome, begin = toy_client(
            running.address,
            running.rule,
            values,
            worker=worker,
            size=SIZE,
            eta=1.0,
            gradient=gradient,
            deadlines=PATIENT,
            wire_format=wire_format,
        )
        self._loop = begin(welcome)
        next(self._loop)
        self._request: Any = self._compute(self._loop.send(self.client.pull()))

    def _compute(self, request: Any) -> Any:
        while isinstance(request, Compute):
            request = self._loop.send(None)
        return request

    def turn(self) -> bool:
        """Commit; return whether it was refused."""
        reply = self.client.commit(self._request)
        try:
            self._request = self._compute(self._loop.send(reply))
        except StopIteration:
            self.client.leave()
        return reply.refused


@pytest.mark.parametrize("wire_format", FORMATS)
def test_the_mini_batches_of_a_refused_commit_are_computed_again_and_counted_once(wire_format: str) -> None:
    rule = make("ringmaster", window=2, threshold=1, patience=None)
    with Running(rule, workers=2, size=SIZE, start=np.zeros(SIZE)) as running:
        slow = Turns(running, 0, [1.0, 2.0, 4.0, 8.0], wire_format)
        fast = Turns(running, 1, [16.0, 32.0, 64.0, 128.0], wire_format)
        assert not fast.turn()
        assert slow.turn()
        assert not fast.turn()
        assert slow.turn()
        assert not slow.turn()
        assert not slow.turn()
        assert slow.taken == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 4.0, 8.0]
        np.testing.assert_allclose(running.driver.center().center, 255.0, rtol=0.02 if wire_format != "float32" else 0)
        rows = running.driver.drain().commits.view(COMMIT)
        assert rows[["worker", "sequence", "first_batch"]].tolist() == [(1, 1, 0), (1, 2, 2), (0, 3, 0), (0, 4, 2)]
        for worker in (slow, fast):
            worker.client.close()


def test_the_residual_after_a_refusal_equals_the_residual_before_the_commit() -> None:
    rng = np.random.default_rng(1)
    first, refused, again = (rng.normal(size=300).astype(np.float32) for _ in range(3))
    disturbed, plain = WorkerFormat("int8", 300), WorkerFormat("int8", 300)
    for one in (disturbed, plain):
        one.encode((first,))
    disturbed.encode((refused,))
    disturbed.restore_residuals((refused,))
    np.testing.assert_allclose(disturbed._residuals[0], plain._residuals[0], atol=1e-6)  # noqa: SLF001 - the residual
    assert np.abs(disturbed._residuals[0]).max() > 1e-3  # noqa: SLF001 - the residual
    np.testing.assert_array_equal(disturbed.encode((again,))[0], plain.encode((again,))[0])
