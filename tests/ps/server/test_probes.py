"""Whether the server is occupied, asked between steps."""

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
from distkeras.ps.protocol.messages import CommitRecord, Compute, ProbeRequest, Reply
from distkeras.ps.rules import make


class HeldUp:
    """Holds the server's commits up, from `entered` on until `go`."""

    def __init__(self, running: Running) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self._commit = present(running.server.center).commit
        present(running.server.center).commit = cast(Any, self)

    def __call__(self, *args: Any) -> bool:
        self.entered.set()
        assert self.go.wait(patience(20))
        return self._commit(*args)


class TestProbes:
    def test_the_server_is_occupied_while_anothers_commit_is_held_up(self) -> None:
        rule = make("zealous_downpour")
        with Running(rule) as running:
            asking = running.client(1)
            asking.join()
            assert not asking.occupied()
            held = HeldUp(running)
            thread, errors = running_worker(running, 0, [np.ones(1)])
            assert held.entered.wait(patience(20))
            assert asking.occupied()
            held.go.set()
            thread.join(patience(20))
            assert errors == []
            assert not asking.occupied()
            asking.close()

    def test_it_is_while_a_commit_waits_for_its_turn(self) -> None:
        with Running(make("downpour")) as running:
            asking = running.client(1)
            asking.join()
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
                while not asking.occupied():  # until the commit is there
                    assert time.monotonic() < deadline
                assert present(running.server.center).clock == 0
            thread.join(patience(20))
            assert not asking.occupied()
            asking.close()
            client.close()

    def test_a_commit_that_waits_for_its_round_to_end_is_incorporated(self) -> None:
        with Running(make("averaging", window=1)) as running:
            asking = running.client(1)
            asking.join()
            thread, _ = running_worker(running, 0, [np.ones(1)] * 2)
            assert running.driver.observe(0, patience(5)).clock == 1
            assert not asking.occupied()
            asking.leave()  # lets the round end
            thread.join(patience(20))
            assert not thread.is_alive()
            asking.close()

    def test_a_worker_adds_gradients_while_the_server_is_occupied(self) -> None:
        rule = make("zealous_downpour", window=3)
        with Running(rule) as running:
            client, loop = toy_worker(running.address, rule, [np.ones(1)] * 9, worker=1, size=SIZE, deadlines=PATIENT)
            next(loop)
            reply: Reply | None = client.pull()
            held = HeldUp(running)
            thread, errors = running_worker(running, 0, [np.ones(1)])
            assert held.entered.wait(patience(20))
            asked = 0
            while not isinstance(request := loop.send(reply), CommitRecord):
                reply = None
                if isinstance(request, ProbeRequest):
                    asked += 1
                    reply = Reply(occupied=client.occupied())
            assert (asked, request.first, request.last) == (2, 0, 2)
            np.testing.assert_allclose(request.parts[0][0], -0.3, rtol=1e-6)
            held.go.set()
            thread.join(patience(20))
            assert errors == []
            client.close()

    def test_a_run_asks_and_commits_every_batch_once(self) -> None:
        values = [np.full(1, float(2**i)) for i in range(6)]
        with Running(make("zealous_downpour"), workers=1) as running:
            thread, errors = running_worker(running, 0, values)
            thread.join(patience(20))
            assert errors == []
            np.testing.assert_allclose(running.driver.center().center[0], -0.1 * 63, rtol=1e-6)
            assert running.driver.drain().commits.view(COMMIT)["steps"].tolist() == [1] * 6

    def test_asking_survives_a_lost_connection(self) -> None:
        with Running(make("zealous_downpour")) as running:
            client = running.client()
            client.join()
            socket_of(present(client.channel)).shutdown(socket.SHUT_RDWR)
            assert not client.occupied()
            assert present(client.pull().center).shape == (SIZE,)  # it holds its lease again
            client.close()

    def test_a_stopped_job_answers_no_question(self) -> None:
        with Running(make("zealous_downpour")) as running:
            client = running.client()
            client.join()
            running.driver.stop("enough")
            with pytest.raises(JobStoppedError, match="enough"):
                client.occupied()
            client.close()
