"""Virtual time: it moves from one event to the next, and events come in the order that drawn times give."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from enum import Enum

import numpy as np

from distkeras.ps.protocol.messages import Compute, ProbeRequest, Reply
from distkeras.ps.simulation.timing import Communication, Timing
from distkeras.ps.simulation.virtual_job import VirtualJob


class _Stage(Enum):
    """How far a worker's window has come when its next event happens."""

    COMPUTED = 1
    SENDS = 2
    PROCESSED = 3


class _ServerQueue:
    """The server takes one exchange at a time, in the order in which they arrive.

    Args:
        service: seconds that each takes.
        probed: whether `occupied` will be asked; else it keeps nothing.
    """

    def __init__(self, service: float, *, probed: bool) -> None:
        self._service = service
        self._probed = probed
        self._free = 0.0  # when all that has come so far is processed
        self._exchanges: deque[tuple[float, float]] = deque()  # when each arrives, and when it is processed

    def add(self, arrival: float) -> float:
        """When an exchange that arrives at ``arrival`` is processed."""
        self._free = max(self._free, arrival) + self._service
        if self._probed:
            self._exchanges.append((arrival, self._free))
        return self._free

    def occupied(self, at: float) -> bool:
        """Return whether an exchange that has arrived is not processed; ``at`` never goes back."""
        while self._exchanges and self._exchanges[0][1] <= at:
            self._exchanges.popleft()
        return bool(self._exchanges) and self._exchanges[0][0] <= at


class VirtualClock:
    """Runs a job in the order that the times give.

    Args:
        job: the workers and their center.
        timing: how long local steps take.
        communication: what an exchange costs.
        seed: of ``timing``.
    """

    def __init__(self, job: VirtualJob, timing: Timing, communication: Communication, seed: int) -> None:
        self._job = job
        self._draw = timing.sampler(job.workers, np.random.default_rng(seed))
        size = job.center.current.array.nbytes
        self._up = communication.transfer(size * job.traits.parts)
        self._down = communication.transfer(size)
        self._latency = communication.latency
        self._takes_time = self._up > 0 or communication.service > 0
        self._server = _ServerQueue(communication.service, probed=job.traits.probes)
        self._order = itertools.count()  # of events at the same time
        self._events: list[tuple[float, int, int, _Stage]] = []
        #: When each worker's latest exchange reaches the server.
        self._arrivals = [0.0] * job.workers

    def run(self, commits: int) -> None:
        """Goes on until there are ``commits`` in all."""
        job = self._job
        for worker in range(job.workers):
            self._begin_steps(worker, 0.0)
        while job.center.clock < commits:
            job.now, _, worker, stage = heapq.heappop(self._events)
            if stage is _Stage.COMPUTED and not self._end_steps(worker):
                continue
            if stage is not _Stage.PROCESSED:
                self._arrivals[worker] = job.now + self._up
                if self._takes_time:
                    self._at(self._server.add(self._arrivals[worker]), worker, _Stage.PROCESSED)
                    continue
            job.exchange(worker, self._arrivals[worker])
            released = job.release_ready()
            if worker not in job.waiting and worker not in released:  # only acknowledged
                released.append(worker)
            for ready in released:
                self._begin_steps(ready, job.now + self._down)

    def _at(self, time: float, worker: int, stage: _Stage) -> None:
        heapq.heappush(self._events, (time, next(self._order), worker, stage))

    def _begin_steps(self, worker: int, since: float) -> None:
        request = self._job.pending[worker]
        assert isinstance(request, Compute)
        self._at(since + self._draw(worker, request.steps), worker, _Stage.COMPUTED)

    def _end_steps(self, worker: int) -> bool:
        """Takes the steps whose time is over; returns whether their exchange is to be sent now."""
        job = self._job
        request, since = job.resume(worker, None), job.now
        if isinstance(request, ProbeRequest):
            # No payload overtakes the question: what it will find there has been sent by now.
            occupied = self._server.occupied(since + self._latency)
            request = job.resume(worker, Reply(occupied=occupied))
            since += 2 * self._latency
        if isinstance(request, Compute):
            self._begin_steps(worker, since)
            return False
        if since > job.now:
            self._at(since, worker, _Stage.SENDS)
            return False
        return True
