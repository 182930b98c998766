r"""Work that moves: shares of a partition that another worker trains, one that has no work left.

A lease covers the mini-batches of a partition from its position to its `PartitionLease.end`; at first, all of them.
When a worker asks for work, the lease that is expected to end last is cut: its holder keeps the earlier mini-batches,
and the later ones become a loan, a lease with a number, an attempt, sequence numbers and vectors of its own. Rules:

1. A cut divides one lease in two, and nothing else changes an end. So the shares of a partition cover it, and none of
   its mini-batches has two.
2. A lease is cut when its holder commits, beyond all that the holder can have begun. The reply to that commit names the
   end, and so does every later reply and the `Welcome` of another attempt. The holder cannot commit again before it has
   received one of them, so it never trains beyond its end; a commit that does is refused.
3. A loan whose holder is gone is lent again, from the position after its last commit.
4. The rows of a loan come from a task that has read the partition, and has offered them. All offers of a partition have
   the same checksum. The task ends when all shares of the partition have ended, and a snapshot has that.

With :math:`r` mini-batches left, a holder of speed :math:`v` and a helper of speed :math:`w` end at the same time if
the helper takes :math:`r w / (v + w)` of them. The cut is where a window of the holder ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from distkeras.ps.center.leases import Leases, LeaseState, PartitionLease
from distkeras.ps.errors import LedgerError
from distkeras.ps.protocol.loop import Position
from distkeras.ps.rules.base import WINDOW_MAX, Rule

#: Windows that a holder may have begun when its commit is answered, with overlap, and one more.
_WINDOWS_AHEAD = 2
#: The least that is lent: so many windows of the holder, and so many seconds of the helper's time.
_LEAST_WINDOWS, _LEAST_SECONDS = 2, 1.0
#: Seconds and windows without a commit after which a worker stands still, so that Spark starts a second attempt if
#: others have ended; and seconds before its second commit.
_STILL_SECONDS, _STILL_WINDOWS, _STILL_SECONDS_AT_FIRST = 30.0, 5.0, 300.0
#: Seconds that a partition may have no task before workers without work leave, so that Spark can start one.
_ABSENT_SECONDS = 10.0
#: A lease is cut if its holder is expected to end so late, as a share of the latest expected end.
_LATE = 0.9


class Offer(NamedTuple):
    """The rows of a partition, which its task can send: the mini-batches of an epoch, the epochs, and where to ask."""

    batches: int
    epochs: int
    host: str
    port: int
    checksum: int


class Lending:
    """Decides what is lent; its caller holds the lock of the center.

    Args:
        leases: of the partitions, and then of the loans.
        workers: number of partitions.
        rule: of the job; its windows decide where a lease may be cut.
        now: clock in seconds, monotonic.
    """

    def __init__(self, leases: Leases, workers: int, rule: Rule, now: Callable[[], float]) -> None:
        self._leases, self._workers, self._rule, self._now = leases, workers, rule, now
        self.offers: dict[int, Offer] = {}
        #: The workers that ask for work, by number and attempt, in the order in which they came, with the speed that
        #: each had, in mini-batches per second.
        self.helpers: dict[tuple[int, int], float] = {}
        #: Returns whether the holder of a lease, by number, has been silent for too long.
        self.is_gone: Callable[[int], bool] = lambda number: False
        #: When the holder of each lease has committed last, or when that was first asked.
        self._committed_at: dict[int, float] = {}
        #: Since when a partition has been seen without a task, and when that was seen last.
        self._absent: tuple[float, float] | None = None

    def offer(self, partition: int, offer: Offer) -> None:
        """Note where the rows of a partition are; LedgerError if some were lent that are not these."""
        lease = self._leases.get(partition)  # a restarted server may have none
        if lease is not None and lease.rows_checksum not in (-1, offer.checksum):
            raise LedgerError(
                f"the input has not returned the same rows as before: checksum {offer.checksum:#018x} of the rows of "
                f"partition {partition}, which was {lease.rows_checksum:#018x}",
                worker=partition,
            )
        self.offers[partition] = offer

    def withdraw_offer(self, partition: int, place: tuple[str, int]) -> None:
        """Note that the rows of a partition cannot be had at ``place``, unless another attempt has offered them."""
        offer = self.offers.get(partition)
        if offer is not None and (offer.host, offer.port) == place:
            del self.offers[partition]

    def ask(self, worker: int, attempt: int) -> None:
        """Note that an attempt of ``worker``, which has no work left, asks for some."""
        self.helpers.setdefault((worker, attempt), self._known_pace(worker))

    def withdraw(self, worker: int, attempt: int) -> None:
        """Note that an attempt of ``worker`` no longer asks."""
        self.helpers.pop((worker, attempt), None)

    def promise(self, number: int, worker: int, attempt: int) -> Offer:
        """Promise loan ``number`` to an attempt of ``worker``; return where its rows are."""
        lease = self._leases.lend(number, worker, attempt, self._now())
        return self.offers[lease.partition]

    def expect(self, lease: PartitionLease) -> None:
        """Keep a loan for its holder, which has to join a restarted server."""
        lease.promised_at = self._now()

    def free_loan(self) -> int | None:
        """Return the number of a loan without a holder, or whose holder is silent."""
        for number, lease in self._leases.loans():
            unheld = lease.state is LeaseState.FREE or (lease.connected and self.is_gone(number))
            if unheld and not lease.promised(self._now()) and lease.partition in self.offers:
                return number
        return None

    def cut(self, number: int) -> int | None:
        """Cut lease ``number``, whose holder commits now, if a helper waits and the lease is expected to end last.

        Returns:
            The number of the new loan; None: nothing was cut.
        """
        self._committed_at[number] = self._now()
        lease, speed = self._leases[number], next(iter(self.helpers.values()), None)
        helps = number >= self._workers and lease.holder != lease.partition
        if helps and lease.partition in self.offers and not self._leases.owes(lease.holder) and self._needs_slots():
            return self._recall(number)
        if speed is None or lease.partition not in self.offers or any(self._unheld_loans()):
            return None
        pace, seconds = lease.pace(self._now()), self._seconds_left(lease)
        if pace is None or seconds is None or seconds < _LATE * max(self._all_seconds_left(), default=0.0):
            return None
        offer, left = self.offers[lease.partition], self._left(lease)
        window = self._longest_window(offer)
        lent = min(int(left * speed / (pace + speed)), left - _WINDOWS_AHEAD * window)
        if lent < max(_LEAST_WINDOWS * window, _LEAST_SECONDS * speed):
            return None
        return self._cut_at(number, self._window_end(lease, lent))

    def _recall(self, number: int) -> int | None:
        """End a loan soon, whose holder has a slot that a task of the job needs; return the number of the rest."""
        lease = self._leases[number]
        ahead = self._left(lease) - _WINDOWS_AHEAD * self._longest_window(self.offers[lease.partition])
        return self._cut_at(number, self._window_end(lease, ahead)) if ahead > 0 else None

    def _cut_at(self, number: int, at: Position) -> int | None:
        lease = self._leases[number]
        if at >= self._end(lease):
            return None
        offer = self.offers[lease.partition]
        self._leases[lease.partition].rows_checksum = offer.checksum
        return self._leases.cut(number, at, before=at[0] + at[1] / offer.batches)

    def may_leave(self, worker: int) -> bool:
        """Return whether a worker that has no work must not wait for some.

        All mini-batches are trained; or a task of the job may need its slot, and no other worker needs its rows.
        """
        return self._leases.complete or (self._needs_slots() and not self._leases.owes(worker))

    def _needs_slots(self) -> bool:
        """Return whether Spark has to start a task: one has not begun, or is absent, silent or still for a while."""
        if sum(1 for _ in self._leases.partitions()) < self._workers:
            return True
        absent = any(
            lease.state is LeaseState.FREE
            or (lease.connected and (self.is_gone(number) or self._stands_still(number)))
            or (self._leases.owes(number) and number not in self.offers)
            for number, lease in self._leases.partitions()
        )
        since, seen = self._absent or (self._now(), self._now())
        if self._now() - seen > _ABSENT_SECONDS:  # it may have been there since it was seen absent
            since = self._now()
        self._absent = (since, self._now()) if absent else None
        return absent and self._now() - since >= _ABSENT_SECONDS

    def _stands_still(self, number: int) -> bool:
        lease = self._leases[number]
        pace, still = lease.pace(), self._now() - self._committed_at.setdefault(number, self._now())
        # Before the second commit, the model is built and compiled.
        return still >= (
            _STILL_SECONDS_AT_FIRST if pace is None else _STILL_SECONDS + _STILL_WINDOWS * lease.steps / pace
        )

    def _unheld_loans(self) -> Iterator[int]:
        loans = self._leases.loans()
        return (number for number, lease in loans if lease.state is LeaseState.FREE and lease.partition in self.offers)

    def _known_pace(self, worker: int) -> float:
        """Return the latest pace of ``worker``, or the mean of all workers'."""
        found = [(lease.holder, pace) for lease in self._leases.values() if (pace := lease.pace()) is not None]
        own = [pace for holder, pace in found if holder == worker]
        return own[-1] if own else sum(pace for _, pace in found) / len(found) if found else 1.0

    def _all_seconds_left(self) -> Iterator[float]:
        found = (self._seconds_left(lease) for lease in self._leases.values())
        return (seconds for seconds in found if seconds is not None)

    def _seconds_left(self, lease: PartitionLease) -> float | None:
        """Return when the holder of a lease is expected to end; None: unknown, or it does not commit now."""
        pace = lease.pace(self._now())
        if pace is None or not lease.connected or lease.partition not in self.offers:
            return None
        return self._left(lease) / pace

    def _end(self, lease: PartitionLease) -> Position:
        return lease.end or (self.offers[lease.partition].epochs, 0)

    def _left(self, lease: PartitionLease) -> int:
        """Return the number of mini-batches that a lease has left."""
        epoch, batch = self._end(lease)
        return (epoch - lease.epoch) * self.offers[lease.partition].batches + batch - lease.batch

    def _window_end(self, lease: PartitionLease, count: int) -> Position:
        """Return the first position, of the last ``count`` of a lease, at which an equally long window ends."""
        batches, (epoch, batch), window = self.offers[lease.partition].batches, self._end(lease), self._rule.window
        epoch, batch = divmod(epoch * batches + batch - count, batches)
        if isinstance(window, int):  # windows begin with the epoch
            batch += -batch % window
        return (epoch, batch) if batch < batches else (epoch + 1, 0)

    def _longest_window(self, offer: Offer) -> int:
        """Return the most steps of a window that a worker may begin before it knows of a cut."""
        window = self._rule.window_by_speed or self._rule.window
        if isinstance(window, int):
            return window
        return offer.batches if window is None else WINDOW_MAX
