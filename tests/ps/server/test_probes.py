"""Probes: a worker requests between steps whether the server is occupied."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, cast

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.present import present
from support.ps.running_server import SIZE, Running
from support.ps.sockets import socket_of
from support.ps.toy_model import toy_worker
from support.ps.worker_thread import running_worker

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import (
    JobStoppedError,
)
from distkeras.ps.protocol.loop import CommitRecord, Compute, ProbeRequest, Reply
from distkeras.ps.rules import make


class BlockedCommit:
    """A center whose commits block: it sets `entered` and then waits for `go`."""

    def __init__(self, running: Running) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self._commit = present(running.server.center).commit
        present(running.server.center).commit = cast(Any, self)

    def __call__(self, *args: Any) -> bool:
        self.entered.set()
        assert self.go.wait(patience(20))
        return self._commit(*args)


class TestProbes:
    def test_the_server_is_occupied_while_another_workers_commit_is_blocked(self) -> None:
        rule = make("zealous_downpour")
        with Running(rule) as running:
            prober = running.client(1)
            prober.join()
            assert not prober.occupied()
            held = BlockedCommit(running)
            thread, errors = running_worker(running, 0, [np.ones(1)])
            assert held.entered.wait(patience(20))
            assert prober.occupied()
            held.go.set()
            thread.join(patience(20))
            assert errors == []
            assert not prober.occupied()
            prober.close()

    def test_the_server_is_occupied_while_a_commit_waits_for_the_lock(self) -> None:
        with Running(make("downpour")) as running:
            prober = running.client(1)
            prober.join()
            where, rule = running.address, running.rule
            client, loop = toy_worker(where, rule, [np.ones(1)], worker=0, size=SIZE, deadlines=PATIENT)
            next(loop)
            request: Any = loop.send(client.pull())
            while isinstance(request, Compute):
                request = loop.send(None)
            thread = threading.Thread(target=client.commit, args=(request,), daemon=True)
            deadline = time.monotonic() + patience(20)
            with running.server.dispatcher.changed:
                thread.start()
                while not prober.occupied():  # The commit has not arrived yet.
                    assert time.monotonic() < deadline
                assert present(running.server.center).clock == 0
            thread.join(patience(20))
            assert not prober.occupied()
            prober.close()
            client.close()

    def test_a_commit_that_waits_for_its_round_does_not_occupy_the_server(self) -> None:
        with Running(make("averaging", window=1)) as running:
            prober = running.client(1)
            prober.join()
            thread, _ = running_worker(running, 0, [np.ones(1)] * 2)
            assert running.driver.observe(0, patience(5)).clock == 1
            assert not prober.occupied()
            prober.leave()  # This ends the round.
            thread.join(patience(20))
            assert not thread.is_alive()
            prober.close()

    def test_a_worker_adds_gradients_while_the_server_is_occupied(self) -> None:
        rule = make("zealous_downpour", window=3)
        with Running(rule) as running:
            client, loop = toy_worker(running.address, rule, [np.ones(1)] * 9, worker=1, size=SIZE, deadlines=PATIENT)
            next(loop)
            reply: Reply | None = client.pull()
            held = BlockedCommit(running)
            thread, errors = running_worker(running, 0, [np.ones(1)])
            assert held.entered.wait(patience(20))
            probes = 0
            while not isinstance(request := loop.send(reply), CommitRecord):
                reply = None
                if isinstance(request, ProbeRequest):
                    probes += 1
                    reply = Reply(occupied=client.occupied())
            assert (probes, request.first, request.last) == (2, 0, 2)
            np.testing.assert_allclose(request.parts[0][0], -0.3, rtol=1e-6)
            held.go.set()
            thread.join(patience(20))
            assert errors == []
            client.close()

    def test_a_worker_with_probes_commits_every_mini_batch_once(self) -> None:
        values = [np.full(1, float(2**i)) for i in range(6)]
        with Running(make("zealous_downpour"), workers=1) as running:
            thread, errors = running_worker(running, 0, values)
            thread.join(patience(20))
            assert errors == []
            np.testing.assert_allclose(running.driver.center().center[0], -0.1 * 63, rtol=1e-6)
            assert running.driver.drain().commits.view(COMMIT)["steps"].tolist() == [1] * 6

    def test_a_probe_survives_a_lost_connection(self) -> None:
        with Running(make("zealous_downpour")) as running:
            client = running.client()
            client.join()
            socket_of(present(client.channel)).shutdown(socket.SHUT_RDWR)
            assert not client.occupied()
            assert present(client.pull().center).shape == (SIZE,)  # The client has joined again and holds its lease.
            client.close()

    def test_a_probe_of_a_stopped_job_is_refused(self) -> None:
        with Running(make("zealous_downpour")) as running:
            client = running.client()
            client.join()
            running.driver.stop("enough")
            with pytest.raises(JobStoppedError, match="enough"):
                client.occupied()
            client.close()
