"""A worker's part in work that moves: it offers the rows of its partition, and trains those of others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from distkeras.ps.errors import DistkerasError, LeaseLostError, MemberLostError, ServerLostError
from distkeras.ps.protocol.loop import Loop, Position
from distkeras.ps.protocol.messages import Loan, OfferRows, Welcome
from distkeras.ps.rules.base import BatchLike
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.help_client import HelpClient
from distkeras.ps.transport.row_links import RawBatch, RowClient, RowServer
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)

#: Seconds after which an offer is repeated.
_AGAIN_SECONDS = 10.0
#: How often in a row the rows of a loan may be lost before its first commit.
_MOST_LOSSES = 5
_Batch = TypeVar("_Batch", bound=BatchLike)


class RowsLost(Exception):
    """The rows of a loan cannot be had any more; another attempt at their partition will offer them again."""


class RowSource(Protocol):
    """The rows of a partition, all of which are read and kept."""

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of mini-batches of an epoch."""

    @property
    def checksum(self) -> int:
        """Return the checksum of all rows."""

    def raw_batches(self, epoch: int, number: int) -> Iterator[RawBatch]:
        """Yield the mini-batches from a position on; called in several threads."""


@dataclass(frozen=True)
class LoanTask:
    """How a task trains mini-batches that are lent to it.

    Args:
        client: returns the client for a lease, by its number and that of the attempt's latest connection for it.
        begin: returns the loop that trains mini-batches of a partition, by its number, with a replica, which the stack
            closes. The mini-batches end where the client's lease does.
        ahead: returns a context with mini-batches that are fetched ahead of their use.
    """

    client: Callable[[int, int], WorkerClient]
    begin: Callable[[ExitStack, WorkerClient, int, Iterator[RawBatch]], Loop]
    ahead: Callable[[Iterator[RawBatch], int], AbstractContextManager[Iterator[RawBatch]]]


class Helping:
    """Offers and loans of one attempt at a partition.

    Args:
        address: of the server.
        worker: the number of the partition.
        epochs: of the job.
        host: the address at which other workers reach this one; called when rows are offered.
        workers: the number of workers of the job.
        task: trains loans.
    """

    def __init__(  # noqa: PLR0913 - independent facts of one attempt, which its caller names
        self,
        address: Address,
        deadlines: Deadlines,
        *,
        worker: int,
        attempt: int,
        epochs: int,
        host: Callable[[], str],
        workers: int,
        task: LoanTask,
        world: World = REAL,
    ) -> None:
        self._address, self._deadlines, self._world = address, deadlines, world
        self._worker, self._attempt = worker, attempt
        self._epochs, self._host, self._workers, self._task = epochs, host, workers, task
        self._server = HelpClient(address, deadlines, worker=worker, attempt=attempt, world=world)
        self._rows: RowServer | None = None
        self._source: RowSource | None = None
        #: Whether no other worker can reach this one.
        self._closed_to_others = False
        self._offered_to, self._offered_at = 0, 0.0
        #: The latest connection for each loan: the same one may come again, and an older connection for it is stale.
        self._connections: dict[int, int] = {}
        self._losses = 0

    def offer(self, make_source: Callable[[], RowSource], incarnation: int) -> None:
        """Offer the partition's rows to the server of this incarnation, unless it has the offer."""
        now = self._world.monotonic()
        if self._closed_to_others or (self._offered_to == incarnation and now < self._offered_at + _AGAIN_SECONDS):
            return
        if self._rows is None:
            source, key, deadlines = make_source(), self._address.key, self._deadlines
            try:
                host = self._host()
                self._rows = RowServer(host, key, deadlines, source.raw_batches, self._workers, self._world)
            except (OSError, ServerLostError) as error:  # such as a name of this host that is not its own
                self._closed_to_others = True
                log.warning("the rows of partition %d cannot be lent: %s", self._worker, error)
                return
            self._source = source
            self._server.rows = OfferRows(
                self._worker,
                self._attempt,
                *self._rows.address,
                source.batches_per_epoch,
                self._epochs,
                source.checksum,
            )
        self._server.offer()
        self._offered_to, self._offered_at = incarnation, now

    def renew(self, incarnation: int) -> None:
        """Repeat the offer, if there is one: the server may have been restarted, or believe that the rows are gone."""
        source = self._source
        if source is not None:
            self.offer(lambda: source, incarnation)

    def help(self, is_over: Callable[[], bool]) -> None:
        """Train loans until there are none."""
        lost: Loan | None = None
        while not is_over():
            loan = self._server.ask(lost)
            if loan.over:
                return
            lost = None if loan.number < 0 or self._train(loan) else loan

    def _train(self, loan: Loan) -> bool:
        """Train a loan to its end, or until it is lost; return whether its rows could be had."""
        client, began = self._task.client(loan.number, self._connections.get(loan.number, 0)), 0
        try:
            with ExitStack() as stack:
                welcome = client.join()
                began = welcome.sequence
                run_worker(client, welcome, partial(self._loop, stack, client, loan))
        except LeaseLostError:  # another worker has it, or the server was restored from a state before it
            return True
        except RowsLost as lost:
            self._losses = self._losses + 1 if client.sequence == began else 1
            if self._losses >= _MOST_LOSSES:
                raise (lost.__cause__ or lost) from None
            return False
        except DistkerasError as error:
            error.worker = loan.partition if error.worker == loan.number else error.worker
            raise
        finally:
            self._connections[loan.number] = client.hello.connection
            client.close()
        return True

    def _loop(self, stack: ExitStack, client: WorkerClient, loan: Loan, welcome: Welcome) -> Loop:
        stack.close()  # what an earlier loop had
        if loan.partition == self._worker and self._source is not None:
            own = self._source.raw_batches(welcome.epoch, welcome.batch)
            return self._task.begin(stack, client, loan.partition, _tracked(client, loan, own))
        rows = RowClient(
            (loan.host, loan.port),
            self._address.key,
            self._deadlines,
            hello=client.hello,
            begin=(welcome.epoch, welcome.batch),
            end=lambda: client.end or (self._epochs, 0),
            world=self._world,
        )
        ahead = stack.enter_context(self._task.ahead(iter(rows), loan.number))
        stack.callback(rows.hang_up)
        return self._task.begin(stack, client, loan.partition, _tracked(client, loan, ahead))

    def close(self) -> None:
        """End the row server and the connection."""
        if self._rows is not None:
            self._rows.close()
        self._server.close()


def _tracked(client: WorkerClient, loan: Loan, rows: Iterator[RawBatch]) -> Iterator[RawBatch]:
    """Yield ``rows``, and note for commits how much of the epoch is complete."""
    try:
        for batch in rows:
            client.passed = 1.0 if batch.last else (batch.number + 1) / loan.batches
            yield batch
    except MemberLostError as error:
        raise RowsLost from error


def bounded(batches: Iterator[_Batch], end: Callable[[], Position | None]) -> Iterator[_Batch]:
    """Yield mini-batches up to the position ``end()``, from which on another worker trains; None: all."""
    for batch in batches:
        last = end()
        if last is not None and (batch.epoch, batch.index) >= last:
            return
        yield batch
