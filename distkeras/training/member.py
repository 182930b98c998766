"""A task whose worker exchanges with others after each step: the Spark side of `worker.daso`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from distkeras.data.batches import Batch
from distkeras.data.source import BatchSource
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import EmptyDataError
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules.daso import Daso
from distkeras.ps.settings import WorkerSettings
from distkeras.ps.transport.members import MemberLinks
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.daso import run_member
from distkeras.training.server_task import own_address


def members_host(server: str) -> str:
    """Return the address at which other workers reach this one: this machine's, or loopback if the server uses it."""
    loopback = server.startswith("127.") and not os.environ.get("SPARK_LOCAL_IP")
    return server if loopback else own_address()


def node_name() -> str:
    """Return the name that all workers of one node share: the address in Spark's configuration, or the host's name."""
    return os.environ.get("SPARK_LOCAL_IP") or socket.gethostname()


def member_loop(
    client: WorkerClient,
    settings: WorkerSettings,
    replica: KerasReplica,
    batches: Iterator[Batch],
    *,
    source: BatchSource,
    welcome: Welcome,
    epochs: int,
    moving_statistics: int,
) -> Loop:
    """Return the loop of a member, which begins once all of them are ready.

    Args:
        batches: those of ``source`` from the partition's position on, which is in ``welcome``.
        epochs: of the job.
        moving_statistics: elements of them.

    Raises:
        EmptyDataError: the partition has no rows.
    """
    rule = settings.rule
    assert isinstance(rule, Daso), rule
    source.read_to_end()  # all members must know how many steps an epoch has
    if not source.rows:
        raise EmptyDataError(
            f"rule {rule.name!r} needs rows in every partition. Received: none. Use fewer workers", worker=client.worker
        )
    source.rewind((welcome.epoch, welcome.batch), None if welcome.checksum < 0 else welcome.checksum)

    def meet(node: str) -> MemberLinks | None:
        links = MemberLinks(
            members_host(client.address.locate()[0]),
            client.address.key,
            worker=client.worker,
            attempt=client.attempt,
            size=client.size,
            shared=settings.shared_memory,
            deadlines=settings.deadlines,
        )
        return links if links.meet(client, node, source.batches_per_epoch) else None

    return run_member(
        rule,
        replica,
        batches,
        lambda: client.payload(rule.traits.parts),
        welcome=welcome,
        worker=client.worker,
        node=node_name(),
        epochs=epochs,
        meet=meet,
        moving_statistics=moving_statistics,
    )
