"""Drives a worker's loop over its connection to the parameter server."""

from __future__ import annotations

from collections.abc import Callable

from distkeras.ps.errors import LeaseLostError
from distkeras.ps.protocol.messages import CommitRecord, Welcome
from distkeras.ps.protocol.requests import (
    CollectRequest,
    Compute,
    Loop,
    PostRequest,
    ProbeRequest,
    PullRequest,
    Reply,
    Request,
)
from distkeras.ps.transport.worker_client import RestartFromCenter, WorkerClient


def run_worker(client: WorkerClient, welcome: Welcome, begin: Callable[[Welcome], Loop]) -> None:
    """Drives the worker's loop to its end, then leaves.

    A server that was restarted from a snapshot has forgotten the latest commits, and another attempt may have held
    the lease in between: the loop is then begun again where the partition stands. So it is after a commit that was
    skipped for its numbers: what had led to them is forgotten. A job that ends early begins no loop any more.

    Args:
        client: the worker's connection.
        welcome: what its `join` returned.
        begin: makes the loop that goes on from there.
    """
    while not welcome.finished:
        client.forget_residuals()  # they belong to steps that are forgotten
        loop = _ended_loop() if welcome.stopping else begin(welcome)
        try:
            return _drive(client, loop)
        except RestartFromCenter as restart:
            welcome = restart.welcome
        except LeaseLostError:
            # Were this attempt to end now, Spark could take it for the one that counts. It waits for its turn.
            welcome = client.rejoin()
        finally:
            loop.close()


def _drive(client: WorkerClient, loop: Loop) -> None:
    """Answers the loop's requests until it ends, and leaves."""
    try:
        reply: Reply | None = None
        while True:
            reply = _answer(client, loop.send(reply))
    except StopIteration:
        client.leave()
    finally:
        client.settle()


def _answer(client: WorkerClient, request: Request) -> Reply | None:
    match request:
        case Compute():
            return None
        case CommitRecord():
            return client.commit(request)
        case PullRequest():
            return client.pull()
        case PostRequest():
            client.post(request.commit)
            return None
        case CollectRequest():
            return client.collect()
        case ProbeRequest():
            return Reply(occupied=client.occupied())


def _ended_loop() -> Loop:
    """A worker's loop that has ended."""
    yield from ()
