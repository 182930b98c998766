"""The server's answers to requests about work that moves: see `center.loans`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from distkeras.ps.center.center import Center
from distkeras.ps.center.loans import Lending, Offer
from distkeras.ps.events import report
from distkeras.ps.protocol import messages
from distkeras.ps.protocol.messages import Message
from distkeras.ps.server.job_state import JobCondition, Peer

log = logging.getLogger(__name__)

#: The longest time that one request for work waits, in seconds; then the worker asks again.
_WAIT_SECONDS = 10.0
_LENT = "worker %d trains mini-batches of partition %d, from %d of epoch %d on"


class LoanRequests:
    """Notes who offers rows, and lends to those who ask for work.

    Args:
        require_center: returns the center, and waits until it is published; its caller holds the lock.
        is_gone: returns whether the holder of a lease, by number, has been silent for too long.
        wait_until_saved: waits until a snapshot covers all commits so far.
    """

    def __init__(
        self,
        changed: JobCondition,
        require_center: Callable[[Peer], Center],
        is_gone: Callable[[int], bool],
        wait_until_saved: Callable[[Peer, int], None],
        acknowledge: Callable[[], messages.Ack],
    ) -> None:
        self._changed, self._require_center, self._is_gone = changed, require_center, is_gone
        self._wait_until_saved, self._acknowledge = wait_until_saved, acknowledge

    def offer(self, peer: Peer, message: messages.OfferRows) -> Message:
        """Note where the rows of a partition are."""
        with self._changed:
            lending = self._require_center(peer).lending
            if lending is not None:
                offer = Offer(message.batches, message.epochs, message.host, message.port, message.checksum)
                lending.offer(message.worker, offer)
                self._changed.notify_all()
        return self._acknowledge()

    def lend(self, peer: Peer, message: messages.AskForWork) -> Message:
        """Wait for a loan, and promise it to the sender; or let it leave, or ask again."""
        with self._changed:
            center = self._require_center(peer)
            lending, worker = center.lending, message.worker
            if lending is None:
                return messages.Loan(over=True)
            lending.is_gone = self._is_gone
            lending.withdraw_offer(message.lost, (message.host, message.port))
            lending.ask(worker, message.attempt)
            try:
                self._changed.wait_while_running(
                    lambda: center.stopping is not None or lending.free_loan() is not None or lending.may_leave(worker),
                    _WAIT_SECONDS,
                    peer.hung_up,
                )
                if center.stopping is not None:
                    return messages.Loan(over=True)
                over, number = lending.may_leave(worker), lending.free_loan()
                if number is not None and not over:
                    return self._promise(center, lending, number, message)
            finally:
                lending.withdraw(worker, message.attempt)
            if over:  # else a restarted server may need the rows of this worker again
                self._wait_until_saved(peer, worker)
            return messages.Loan(over=over)

    def _promise(self, center: Center, lending: Lending, number: int, message: messages.AskForWork) -> messages.Loan:
        offer, lease = lending.promise(number, message.worker, message.attempt), center.leases[number]
        where = message.worker, lease.partition, lease.batch, lease.epoch
        report(log, "lent", _LENT, *where, worker=message.worker, attempt=message.attempt, level=logging.INFO)
        return messages.Loan(number, lease.partition, offer.batches, offer.host, offer.port)
