"""The requests of a worker's loop, their order and their contents, without a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.ps.toy_model import ToyBatch, ToyReplica, batches

from distkeras.ps.protocol.loop import CommitRecord, Loop, Reply, Request
from distkeras.ps.rules import make
from distkeras.ps.worker.loop import work

SIZE = 3


class Normalized(ToyReplica):
    """A replica of which each step adds 1 to the moving statistics."""

    def train(self, batches: Sequence[ToyBatch]) -> np.ndarray:
        self.moving_statistics = self.moving_statistics + len(batches)
        return super().train(batches)


def new_loop(steps: int, *, overlap: bool) -> Loop:
    return work(
        make("downpour"),
        Normalized(SIZE, 0.1, dtype=np.float32),
        batches([0.0] * steps),
        lambda: (np.empty(SIZE, np.float32),),
        moving_statistics=2,
        overlap=overlap,
    )


def requests_of(loop: Loop, statistics: Sequence[Sequence[float]]) -> list[Request]:
    """Return all requests of ``loop``; the replies contain ``statistics``, in this order."""
    replies = iter(statistics)
    requests = [next(loop)]
    try:
        while True:
            kind = type(requests[-1]).__name__
            reply = None
            if kind in ("PullRequest", "CommitRecord", "CollectRequest"):
                reply = Reply(0.0, np.zeros(SIZE, np.float32), np.array(next(replies), np.float32))
            requests.append(loop.send(reply))
    except StopIteration:
        return requests


def test_a_commit_contains_the_moving_statistics_of_the_model() -> None:
    requests = requests_of(new_loop(2, overlap=False), [(5.0, 7.0), (1.0, 2.0), (0.0, 0.0)])
    commits = [request for request in requests if isinstance(request, CommitRecord)]
    assert [commit.moving_statistics.tolist() for commit in commits] == [[6.0, 8.0], [2.0, 3.0]]


def test_a_posted_commit_is_collected_before_the_next_one_and_at_the_end() -> None:
    requests = requests_of(new_loop(2, overlap=True), [(0.0, 0.0)] * 3)
    exchanges = [type(request).__name__ for request in requests if type(request).__name__ != "Compute"]
    assert exchanges == ["PullRequest", "PostRequest", "CollectRequest", "PostRequest", "CollectRequest"]
