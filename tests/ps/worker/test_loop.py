"""What a worker's loop asks for, in which order, and with what in it: without a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.ps.toy_model import ToyBatch, ToyReplica, batches

from distkeras.ps.protocol.messages import CommitRecord, Loop, Reply, Request
from distkeras.ps.rules import make
from distkeras.ps.worker.loop import work

SIZE = 3


class Normalized(ToyReplica):
    """Each step adds one to its moving statistics."""

    def train(self, batches: Sequence[ToyBatch]) -> np.ndarray:
        self.moving_statistics = self.moving_statistics + len(batches)
        return super().train(batches)


def begun(steps: int, *, overlap: bool) -> Loop:
    return work(
        make("downpour"),
        Normalized(SIZE, 0.1, dtype=np.float32),
        batches([0.0] * steps),
        lambda: (np.empty(SIZE, np.float32),),
        moving_statistics=2,
        overlap=overlap,
    )


def answered(loop: Loop, statistics: Sequence[Sequence[float]]) -> list[Request]:
    """All that ``loop`` asks for; the replies carry these statistics, one after the other."""
    replies = iter(statistics)
    asked = [next(loop)]
    try:
        while True:
            kind = type(asked[-1]).__name__
            reply = None
            if kind in ("PullRequest", "CommitRecord", "CollectRequest"):
                reply = Reply(0.0, np.zeros(SIZE, np.float32), np.array(next(replies), np.float32))
            asked.append(loop.send(reply))
    except StopIteration:
        return asked


def test_the_moving_statistics_of_a_commit_are_those_of_the_model() -> None:
    asked = answered(begun(2, overlap=False), [(5.0, 7.0), (1.0, 2.0), (0.0, 0.0)])
    commits = [request for request in asked if isinstance(request, CommitRecord)]
    assert [commit.moving_statistics.tolist() for commit in commits] == [[6.0, 8.0], [2.0, 3.0]]


def test_a_commit_that_travels_is_waited_for_before_the_next_and_at_the_end() -> None:
    asked = answered(begun(2, overlap=True), [(0.0, 0.0)] * 3)
    exchanges = [type(request).__name__ for request in asked if type(request).__name__ != "Compute"]
    assert exchanges == ["PullRequest", "PostRequest", "CollectRequest", "PostRequest", "CollectRequest"]
