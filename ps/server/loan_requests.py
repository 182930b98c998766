"""The server's answers to requests about work that moves: see `center.loans`."""

from __future__ import annotations

import logging

from distkeras.ps.center.center import Center
from distkeras.ps.center.loans import Lending, Offer
from distkeras.ps.events import report
from distkeras.ps.protocol import messages
from distkeras.ps.protocol.messages import Message
from distkeras.ps.server.job_state import Peer
from distkeras.ps.server.served_center import ServedCenter

log = logging.getLogger(__name__)

#: The longest time that one request for work waits, in seconds; then the worker asks again.
_WAIT_SECONDS = 10.0
_LENT = "worker %d trains mini-batches of partition %d, from %d of epoch %d on"


class LoanRequests:
    """Notes who offers rows of the center of ``served``, and lends to those who ask for work."""

    def __init__(self, served: ServedCenter) -> None:
        self._served, self._changed = served, served.changed

    def offer(self, peer: Peer, message: messages.OfferRows) -> Message:
        """Note where the rows of a partition are."""
        with self._changed:
            lending = self._served.require_center(peer).lending
            if lending is not None:
                offer = Offer(message.batches, message.epochs, message.host, message.port, message.checksum)
                lending.offer(message.worker, offer)
                self._changed.notify_all()
        return self._served.acknowledge()

    def lend(self, peer: Peer, message: messages.AskForWork) -> Message:
        """Wait for a loan, and promise it to the sender; or let it leave, or ask again."""
        with self._changed:
            center = self._served.require_center(peer)
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
                self._served.wait_until_saved(peer, worker)
            return messages.Loan(over=over)

    def _promise(self, center: Center, lending: Lending, number: int, message: messages.AskForWork) -> messages.Loan:
        offer, lease = lending.promise(number, message.worker, message.attempt), center.leases[number]
        where = message.worker, lease.partition, lease.batch, lease.epoch
        report(log, "lent", _LENT, *where, worker=message.worker, attempt=message.attempt, level=logging.INFO)
        return messages.Loan(number, lease.partition, offer.batches, offer.host, offer.port)

    def _is_gone(self, number: int) -> bool:
        """Return whether the holder of a lease, by number, has been silent for too long."""
        return self._served.seconds_silent(number) >= self._served.deadlines.lease
