"""The server's answers to the driver: the center's publication, progress, records, changes, and the job's end."""

from __future__ import annotations

import math

import numpy as np

from distkeras.ps.center.driver_values import set_values
from distkeras.ps.center.leases import NO_ATTEMPT
from distkeras.ps.center.micro_batches import begin_micro_batch, commits_before
from distkeras.ps.errors import JobStoppedError
from distkeras.ps.protocol import driver_messages
from distkeras.ps.protocol.messages import Message, fault_of
from distkeras.ps.server.job_state import Peer
from distkeras.ps.server.served_center import ServedCenter
from distkeras.ps.server.table_requests import rows_to_inspect


class DriverRequests:
    """Answers the driver about the center of ``served``."""

    def __init__(self, served: ServedCenter) -> None:
        self._served, self._changed = served, served.changed

    def publish(self, peer: Peer, message: driver_messages.Publish) -> Message:
        """Make the center, unless it was restored."""
        with self._changed:
            self._served.publish(message)
        return self._served.acknowledge()

    def publish_rows(self, peer: Peer, message: driver_messages.PublishRows) -> Message:
        """Store initial rows of a table."""
        return self._served.rows.publish(self._served.center, message)

    def begin_micro_batch(self, peer: Peer, message: driver_messages.BeginMicroBatch) -> Message:
        """Begin a micro-batch, unless it has begun before."""
        with self._changed:
            center = self._served.require_center(peer)
            self._changed.require_running()
            began = begin_micro_batch(center, message.stream, message.number, self._served.settings.make_scheduler())
            if began:
                self._served.connections.clear()
                self._changed.notify_all()
            records = commits_before(center)
            return driver_messages.MicroBatchBegun(center.began[0], records, began, center.leases.complete)

    def observe(self, peer: Peer, message: driver_messages.Observe) -> Message:
        """Wait until the clock is above the driver's, and return the status."""
        served, world = self._served, self._served.world
        # `min` returns its first argument if the second one is NaN.
        deadline = world.monotonic() + min(served.deadlines.reply, message.patience)
        with self._changed:
            while not (self._changed.fault or self._changed.closing):
                if served.center is not None and served.center.clock > message.clock:
                    break
                if not self._changed.wait_for_change(deadline, peer.hung_up):
                    break
            return self._changed.fault or self._status()

    def _status(self) -> driver_messages.Status:
        center, saved = self._served.center, self._served.saved()
        if center is None:
            return driver_messages.Status(0, 0, 0, 0, 0, math.nan, math.nan, tables=self._served.counts_of_tables())
        leases, partitions = center.leases.values(), dict(center.leases.partitions())
        unfinished = {lease.partition for lease in leases if not lease.finished}
        # Partitions without rows do not count for the mean number of epochs.
        empty = sum(lease.finished and not lease.sequence for lease in partitions.values())
        return driver_messages.Status(
            clock=center.clock,
            joined=len(partitions),
            finished=len(partitions) - len(unfinished),
            batches=center.log.batches,
            samples=center.log.samples,
            loss=center.log.loss,
            staleness=center.log.staleness,
            epochs=sum(lease.epoch + lease.passed - lease.before for lease in leases) / max(1, center.workers - empty),
            saved_clock=saved[0] if saved else -1,
            saved_seconds=self._served.world.monotonic() - saved[1] if saved else math.nan,
            tables=self._served.counts_of_tables(),
            lent=center.log.lent,
        )

    def inspect(self, peer: Peer, message: driver_messages.Inspect) -> Message:
        """Return the present center, and the rows that the driver asks for."""
        with self._changed:
            center = self._served.require_center(peer)
            released = center.inspect(rows_to_inspect(center.tables, message))
        return self._served.reply(peer, center, released, whole=True)

    def inspect_rows(self, peer: Peer, message: driver_messages.InspectRows) -> Message:
        """Return present rows of a table."""
        return self._served.rows.inspect(lambda: self._served.require_center(peer), message)

    def begin_changes(self, peer: Peer, message: driver_messages.BeginChanges) -> Message:
        """Note from which moment on changes of tables are asked for."""
        with self._changed:
            return self._served.rows.begin_changes(self._served.require_center(peer), message)

    def change(self, peer: Peer, message: driver_messages.SetValues | driver_messages.RemoveRows) -> Message:
        """Set numbers for all workers, or remove rows of a table."""
        with self._changed:
            center = self._served.require_center(peer)
            self._changed.require_running()
            if isinstance(message, driver_messages.SetValues):
                set_values(center.values, message, center.clock, center.rule, center.schedule)
            else:
                self._served.rows.remove(center, message)
            answer = self._served.acknowledge()
            self._served.wait_until_saved(peer)  # else a restarted server would continue without the change
        return answer

    def drain(self, peer: Peer, message: driver_messages.Drain) -> Message:
        """Return records of commits."""
        with self._changed:
            center = self._served.require_center(peer)
            commits, _, history = center.log.read(message.start, message.count)
            numbers = len(center.log), center.log.missing
            return driver_messages.Records(*numbers, center.metrics, commits.view(np.uint8), history)

    def list_workers(self, peer: Peer, message: driver_messages.ListWorkers) -> Message:
        """Return who trains, and since when it has been silent."""
        served = self._served
        with self._changed:
            leases, now, workers = served.require_center(peer).leases, served.world.time(), served.settings.workers
            asking = {worker for worker, holder in served.connections.items() if holder.asking}
            rows = [
                (lease.holder, lease.attempt, lease.sequence, 0.0 if number in asking else now - lease.active_at)
                for number, lease in leases.items()
                if not lease.finished and lease.attempt != NO_ATTEMPT
                if number < workers or lease.connected  # of the loans, those that a worker trains now
            ]
            return driver_messages.WorkerTable(np.array(rows, np.float64).reshape(-1, 4))

    def end_early(self, peer: Peer, message: driver_messages.EndEarly) -> Message:
        """End the job successfully; the next reply to each worker asks it to leave."""
        with self._changed:
            self._served.require_center(peer).end_early(message.reason)
            self._changed.notify_all()
        return self._served.acknowledge()

    def abort(self, peer: Peer, message: driver_messages.Abort) -> Message:
        """End the job; each worker's next request is answered by a `Fault`."""
        self._changed.fail(fault_of(JobStoppedError(message.reason)))
        return self._served.acknowledge()
