"""Groups of workers: one commit a round, the simulator's numbers, and each mini-batch counted once after any death."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience
from support.ps.running_server import Running, WorkerThread
from support.ps.toy_model import Values, toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import RelayLostError, RemoteProtocolError
from distkeras.ps.protocol.companions import Companion, join
from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.protocol.messages import Announce, CenterReply, Commit, Members, Pull
from distkeras.ps.rules import make
from distkeras.ps.transport.relay_group import RelayGroup

pytestmark = pytest.mark.timeout(60)

SIZE = 2003


class GroupedWorker(WorkerThread):
    """A worker of a group of ``workers``, in a thread; ``options`` are those of `toy_client`."""

    def __init__(
        self, running: Running, worker: int, values: Values, *, workers: int, node: str = "", **options: Any
    ) -> None:
        self.group = RelayGroup(lambda: "127.0.0.1", node, workers, shared=options.get("shared", False))
        options |= {"size": SIZE, "deadlines": running.deadlines, "group": self.group}
        super().__init__(lambda: toy_client(running.address, running.rule, values, worker=worker, **options))

    def run(self) -> None:
        with contextlib.closing(self.group):
            super().run()


def values_of(workers: int, batches: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(7)
    return [[random.normal(size=SIZE).astype(np.float32) for _ in range(batches)] for _ in range(workers)]


def trained(
    rule: str, groups: Any, data: list[list[np.ndarray]], nodes: Sequence[str] = (), **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    workers = len(data)
    options = dict(options)
    settings = {"groups": groups, "max_skipped": options.pop("max_skipped", 0)}
    with Running(make(rule, window=2), workers=workers, size=SIZE, **settings) as running:
        threads = [
            GroupedWorker(running, worker, values, node=nodes[worker] if nodes else "", workers=workers, **options)
            for worker, values in enumerate(data)
        ]
        assert [thread.ended() for thread in threads] == [None] * workers
        assert running.server.fault is None
        return running.driver.center().center.copy(), running.driver.drain().commits.view(COMMIT)


@pytest.mark.parametrize("shared", [False, True])
def test_a_round_is_one_commit_and_each_mini_batch_counts_once(shared: bool) -> None:
    data = values_of(4, 5)
    center, commits = trained("downpour", 2, data, shared=shared)
    total = sum(np.sum(values, axis=0, dtype=np.float64) for values in data)
    np.testing.assert_allclose(center, -0.1 * total, atol=1e-5)
    assert np.count_nonzero(commits["bytes"]) == 6  # Two groups with three windows each.
    assert commits["clock"].tolist() == [*range(12)]
    for worker in range(4):
        own = commits[commits["worker"] == worker]
        assert own[["sequence", "first_batch", "last_batch"]].tolist() == [(1, 0, 1), (2, 2, 3), (3, 4, 4)]


def test_the_result_of_one_group_is_bitwise_equal_in_any_order_of_arrival() -> None:
    data = values_of(3, 4)
    one, _ = trained("dynsgd", "host", data)
    other, _ = trained("dynsgd", 1, data, nodes=("a", "b", "c"), shared=True)
    np.testing.assert_array_equal(one, other)


def test_the_other_workers_continue_when_a_workers_data_ends() -> None:
    """The first relay is the first to leave."""
    data = [own[: 2 * (worker + 1)] for worker, own in enumerate(values_of(3, 6))]
    center, commits = trained("downpour", 1, data)
    total = sum(np.sum(values, axis=0, dtype=np.float64) for values in data)
    np.testing.assert_allclose(center, -0.1 * total, atol=1e-5)
    assert [int((commits["worker"] == worker).sum()) for worker in range(3)] == [1, 2, 3]


def test_a_nan_skips_only_the_commit_of_its_own_worker() -> None:
    data = values_of(3, 6)
    data[1][2][5] = np.nan
    center, commits = trained("downpour", 1, data, max_skipped=1)
    assert np.isfinite(center).all()
    skipped = commits[commits["skipped"] == 1]
    assert skipped[["worker", "first_batch", "last_batch"]].tolist() == [(1, 2, 3)]
    for worker in range(3):
        own = commits[commits["worker"] == worker]
        assert own["first_batch"].tolist() == [0, 2, 4]


@pytest.mark.parametrize("ends", ["with its data", "by a death"])
def test_a_relay_does_not_wait_for_a_worker_that_ends_before_it_connects(ends: str) -> None:
    with Running(make("downpour", window=2), workers=2, size=SIZE, groups=1) as running:
        relay = GroupedWorker(running, 0, values_of(1, 6)[0], workers=2)
        other = running.client(1, size=SIZE)
        other.join()
        assert other.request(Announce(1, 0, 1, "127.0.0.1", 1, ""), Members).places.startswith("0 ")
        if ends == "with its data":
            other.leave()
        other.close()
        assert relay.ended(15) is None  # This is shorter than a lease.


def test_a_group_commit_that_includes_a_worker_that_has_joined_again_is_refused() -> None:
    """A relay that was suspended sends a contribution that its worker has withdrawn."""
    with Running(make("downpour", window=1), workers=2, size=3, groups=1) as running:
        clients = [running.client(worker, size=3) for worker in (0, 1)]
        with contextlib.closing(clients[0]), contextlib.closing(clients[1]):
            for client in clients:
                client.join()
            for client in clients:
                client.request(Pull(client.worker, 0, 1), CenterReply)
            relay, other = clients
            announcements = [Announce(client.worker, 0, 1, "127.0.0.1", 1 + client.worker, "") for client in clients]
            with ThreadPoolExecutor(2) as pool:  # Each request waits for the other.
                members = [
                    *pool.map(lambda pair: pair[0].request(pair[1], Members), zip(clients, announcements, strict=True))
                ]
            assert {answer.places for answer in members} == {"0 127.0.0.1 1\n1 127.0.0.1 2"}
            own, companion = commit_of(0), commit_of(1)
            whole = join(own, [Companion(other.hello.connection, companion)], (np.empty(3, np.float32),))
            other.rejoin()
            with pytest.raises(RelayLostError, match="must only include workers with a lease"):
                relay.request(whole, CenterReply)
            assert running.driver.observe(-1, 0.0).clock == 0
            other.request(Pull(1, 0, 1), CenterReply)
            again = join(own, [Companion(other.hello.connection, companion)], (np.empty(3, np.float32),))
            assert relay.request(again, CenterReply).clock == 2
            with pytest.raises(RelayLostError, match="this worker is not the relay"):
                other.request(replace(commit_of(1, sequence=2), grouped=True), CenterReply)


def test_a_job_without_groups_takes_neither_sums_nor_companions() -> None:
    joined = join(commit_of(0), [Companion(1, commit_of(1))], commit_of(0).parts)
    refused = {
        "a job without groups": replace(commit_of(0), grouped=True),
        "only a group's commit may have companions": replace(joined, grouped=False),
    }
    with Running(make("downpour", window=1), workers=1, size=3) as running:
        for text, commit in refused.items():
            with contextlib.closing(running.client(size=3)) as client:
                client.join()
                client.pull()
                with pytest.raises(RemoteProtocolError, match=text):
                    client.request(commit, CenterReply)


def test_a_relay_that_does_not_respond_is_replaced() -> None:
    """The relay accepts connections but never answers: its workers report it lost, and one of them replaces it."""
    data = values_of(3, 4)
    deadlines = replace(PATIENT, handshake=brief(1), lease=brief(1))
    with Running(make("downpour", window=2), workers=3, size=SIZE, groups=1, deadlines=deadlines) as running:
        silent = running.client(0, size=SIZE)
        with contextlib.closing(silent), socket.create_server(("127.0.0.1", 0)) as port:
            silent.join()
            workers = [GroupedWorker(running, worker, data[worker], workers=3) for worker in (1, 2)]
            number = int(port.getsockname()[1])
            places = silent.request(Announce(0, 0, 1, "127.0.0.1", number, ""), Members, patience(20)).places
            assert places.startswith(f"0 127.0.0.1 {number}")
            assert [worker.ended() for worker in workers] == [None, None]
        commits = running.driver.drain().commits.view(COMMIT)
        assert sorted(commits["worker"].tolist()) == [1, 1, 2, 2]


def commit_of(worker: int, sequence: int = 1) -> Commit:
    """Return a worker's commit of one mini-batch."""
    record = CommitRecord(0, sequence - 1, sequence - 1, False, True, 0.1, 1.0, (np.ones(3, np.float32),))
    return Commit.of(record, worker=worker, attempt=0, incarnation=1, sequence=sequence)
