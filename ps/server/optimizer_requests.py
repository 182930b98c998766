"""The server's answers to requests about states of the workers' optimizers."""

from __future__ import annotations

import logging

from distkeras.ps.center.leases import NO_ATTEMPT
from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.events import report
from distkeras.ps.protocol import messages
from distkeras.ps.protocol.loop import NO_BYTES
from distkeras.ps.protocol.messages import Message
from distkeras.ps.server.job_state import Peer
from distkeras.ps.server.served_center import ServedCenter

log = logging.getLogger(__name__)


class OptimizerRequests:
    """Keeps a worker's latest optimizer state in its partition's lease, and sends it to the next attempt."""

    def __init__(self, served: ServedCenter) -> None:
        self._served, self._now = served, served.world.time
        #: States arrive before their commits, which wait for the round.
        self._ahead = served.settings.rule.traits.peers

    def keep(self, peer: Peer, message: messages.KeepOptimizer) -> Message:
        """Keep the state; report and discard it if it is damaged or too large."""
        worker, attempt, problem = message.worker, message.attempt, ""
        if message.damaged:
            problem = f"its {message.content.nbytes} bytes have another checksum than {message.checksum:#010x}"
        elif not self._served.states.holds(message.content):
            problem = f"there is no room for its {message.content.nbytes} bytes on the server's disk"
        if problem:
            text = "the optimizer's state after commit %d is not kept: %s"
            report(log, "optimizer", text, message.sequence, problem, worker=worker, attempt=attempt)
            return self._served.acknowledge()
        try:
            with self._served.changed:
                self._served.require_lease(peer, message).keep_optimizer(message, self._now(), ahead=self._ahead)
        except RemoteProtocolError as error:  # a lost lease is reported by the session
            report(
                log, "optimizer", "an optimizer's state is refused: %s", error.message, worker=worker, attempt=attempt
            )
            raise
        return self._served.acknowledge()

    def fetch(self, peer: Peer, message: messages.FetchOptimizer) -> Message:
        """Return the state that is kept for the partition."""
        with self._served.changed:
            kept = self._served.require_lease(peer, message).optimizer
        if kept is None:
            return messages.KeptOptimizer("", NO_BYTES, 0, attempt=NO_ATTEMPT, sequence=0)
        state = kept.state
        return messages.KeptOptimizer(
            state.layout, state.content, state.checksum, attempt=kept.attempt, sequence=kept.sequence
        )

    def taken(self, peer: Peer, message: messages.OptimizerTaken) -> Message:
        """Log whether the worker has loaded the state that it was sent."""
        worker, attempt = message.worker, message.attempt
        with self._served.changed:
            lease = self._served.require_lease(peer, message)
            kept, sequence = lease.optimizer, lease.sequence
        if message.problem or kept is None:
            text = "the optimizer of attempt %d begins with a new state after commit %d: %s"
            problem = message.problem or "none is kept"
            report(log, "optimizer", text, attempt, sequence, problem, worker=worker, attempt=attempt)
        else:
            text = "attempt %d continues after commit %d with the optimizer of attempt %d after commit %d (%.1f s old)"
            where = (attempt, sequence, kept.attempt, kept.sequence, self._now() - kept.kept_at)
            report(log, "optimizer", text, *where, worker=worker, attempt=attempt)
        return self._served.acknowledge()
