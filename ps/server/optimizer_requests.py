"""The server's answers to requests about the states of the workers' optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from distkeras.ps.center.leases import NO_ATTEMPT, PartitionLease, StateMemory
from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.events import report
from distkeras.ps.protocol.messages import (
    NO_BYTES,
    Ack,
    Announce,
    FetchOptimizer,
    KeepOptimizer,
    KeptOptimizer,
    Message,
    OptimizerTaken,
)
from distkeras.ps.server.job_state import JobCondition, Peer
from distkeras.ps.world.world import World

log = logging.getLogger(__name__)

Request = KeepOptimizer | FetchOptimizer | OptimizerTaken | Announce


class OptimizerRequests:
    """Keeps a worker's latest optimizer state in its partition's lease, and sends it to the next attempt.

    Args:
        states: the memory for states.
        require_lease: returns the lease that the sender of a request holds; called under the lock.
        acknowledge: returns an `Ack`.
        ahead: states arrive before the commit to which they belong.
    """

    def __init__(
        self,
        changed: JobCondition,
        states: StateMemory,
        require_lease: Callable[[Peer, Request], PartitionLease],
        acknowledge: Callable[[], Ack],
        world: World,
        ahead: bool = False,
    ) -> None:
        self._changed, self.states, self._now, self._ahead = changed, states, world.time, ahead
        self._require_lease, self._acknowledge = require_lease, acknowledge

    def keep(self, peer: Peer, message: KeepOptimizer) -> Message:
        """Keep the state; report and discard it if it is damaged or too large."""
        worker, attempt, problem = message.worker, message.attempt, ""
        if message.damaged:
            problem = f"its {message.content.nbytes} bytes have another checksum than {message.checksum:#010x}"
        elif not self.states.holds(message.content):
            problem = f"there is no room for its {message.content.nbytes} bytes on the server's disk"
        if problem:
            text = "the optimizer's state after commit %d is not kept: %s"
            report(log, "optimizer", text, message.sequence, problem, worker=worker, attempt=attempt)
            return self._acknowledge()
        try:
            with self._changed:
                self._require_lease(peer, message).keep_optimizer(message, self._now(), ahead=self._ahead)
        except RemoteProtocolError as error:  # a lost lease is reported by the session
            report(
                log, "optimizer", "an optimizer's state is refused: %s", error.message, worker=worker, attempt=attempt
            )
            raise
        return self._acknowledge()

    def fetch(self, peer: Peer, message: FetchOptimizer) -> Message:
        """Return the state that is kept for the partition."""
        with self._changed:
            kept = self._require_lease(peer, message).optimizer
        if kept is None:
            return KeptOptimizer("", NO_BYTES, 0, attempt=NO_ATTEMPT, sequence=0)
        state = kept.state
        return KeptOptimizer(state.layout, state.content, state.checksum, attempt=kept.attempt, sequence=kept.sequence)

    def taken(self, peer: Peer, message: OptimizerTaken) -> Message:
        """Log whether the worker has loaded the state that it was sent."""
        worker, attempt = message.worker, message.attempt
        with self._changed:
            lease = self._require_lease(peer, message)
            kept, sequence = lease.optimizer, lease.sequence
        if message.problem or kept is None:
            text = "the optimizer of attempt %d begins with a new state after commit %d: %s"
            problem = message.problem or "none is kept"
            report(log, "optimizer", text, attempt, sequence, problem, worker=worker, attempt=attempt)
        else:
            text = "attempt %d continues after commit %d with the optimizer of attempt %d after commit %d (%.1f s old)"
            where = (attempt, sequence, kept.attempt, kept.sequence, self._now() - kept.kept_at)
            report(log, "optimizer", text, *where, worker=worker, attempt=attempt)
        return self._acknowledge()
