"""The worker's half of DASO: a replica that takes each step together with its node, and exchanges with other nodes.

`rules.daso` decides which exchange follows each batch; `transport.members` carries it out.

Before its commit, which ends an epoch, a member sends its state to the server. The commits of all members are applied
together. So after a loss, all members continue from the end of the latest round, each with its own state, and take the
same steps as if nothing had been lost.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from distkeras.ps.errors import NonFiniteError, SnapshotError
from distkeras.ps.protocol.loop import CommitRecord, FetchRequest, KeepRequest, Loop, OptimizerState
from distkeras.ps.protocol.messages import KeptOptimizer, Welcome
from distkeras.ps.rules.base import BatchLike, Vector, all_finite
from distkeras.ps.rules.daso import CYCLING, Daso, Turn, Turns, local_step, merge
from distkeras.ps.transport.members import MemberLinks
from distkeras.ps.worker.loop import WorkerReplica, work
from distkeras.ps.worker.optimizer_keeper import StatefulReplica


class MemberModel(WorkerReplica, StatefulReplica, Protocol):
    """The model of a member, whose optimizer may have a state: the step of a schedule, and a loss scale."""


class MemberState(NamedTuple):
    """The state of a member at the end of an epoch, from which it can continue.

    Args:
        node: the name of its node, as it was announced.
        turns: see `Turns.state`.
        optimizer: the layout of the optimizer's state; None: it has none.
        theta, velocity: of its node, shape ``(size,)``, float32.
        sent: the parameters that it sent to its group in the exchange in flight; empty: none is in flight.
        content: of the optimizer's state, bytes.
    """

    node: str
    place: tuple[int, int, int]
    turns: tuple[float, ...]
    optimizer: str | None
    theta: Vector
    velocity: Vector
    sent: Vector
    statistics: Vector
    content: np.ndarray

    def encode(self) -> OptimizerState:
        arrays = [array.view(np.uint8) for array in self[4:]]
        sizes = [array.size for array in arrays]
        content = np.concatenate(arrays)
        return OptimizerState(json.dumps([*self[:4], sizes]), content, zlib.crc32(content.data))

    @classmethod
    def decode(cls, kept: OptimizerState | None, sequence: int, sizes: tuple[int, int], worker: int) -> MemberState:
        """Return the state that `encode` has encoded, taken after commit ``sequence`` and of these ``sizes``."""
        found = kept.sequence if isinstance(kept, KeptOptimizer) else 0
        if kept is None or found != sequence or kept.damaged:
            raise SnapshotError(
                f"the server must have the worker's state after commit {sequence}, to continue from it. "
                f"Received: {'a damaged state' if found == sequence else f'the state after commit {found}'}",
                worker=worker,
            )
        try:
            node, place, turns, optimizer, lengths = json.loads(kept.layout)
            if sum(lengths) != kept.content.size:
                raise ValueError(f"{kept.content.size} bytes")
            parts = np.split(kept.content, np.cumsum(lengths)[:-1])
            theta, velocity, sent, statistics = (part.copy().view(np.float32) for part in parts[:4])
            if (theta.size, velocity.size, statistics.size) != (sizes[0], *sizes) or sent.size not in (0, sizes[0]):
                raise ValueError(f"arrays of {lengths} bytes")
            nodes, devices, rank = place
            return cls(
                *(node, (nodes, devices, rank), tuple(turns), optimizer), theta, velocity, sent, statistics, parts[4]
            )
        except (ValueError, TypeError) as error:
            raise SnapshotError(
                f"the worker's saved state must be of a model with {sizes[0]} parameters. Received: {error}",
                worker=worker,
            ) from error


class MemberReplica:
    """A replica that trains as a member of a node (see `loop.WorkerReplica`), from a ``state``, or from the center.

    Attributes:
        theta: the node's parameters, shape ``(size,)``, float32.
    """

    def __init__(
        self,
        daso: Daso,
        replica: MemberModel,
        links: MemberLinks,
        epochs: int,
        state: MemberState | None = None,
    ) -> None:
        membership = links.membership
        self._daso, self._replica, self._links, self._epochs = daso, replica, links, epochs
        self._membership = membership
        self._turns = Turns(daso, membership.nodes, membership.devices)
        self.theta: Vector = np.zeros(replica.size, np.float32)
        self._velocity = np.zeros_like(self.theta)
        #: The sum of the losses of this member's samples in the present epoch, and the number of these samples.
        self._loss, self._samples = 0.0, 0.0
        #: The parameters that this member sent in the exchange in flight, if it belongs to that group.
        self._sent: Vector | None = None
        #: The optimizer's state, which is loaded with the first mini-batch.
        self._optimizer: OptimizerState | None = None
        self._restored = state is not None
        if state is not None:
            self._restore(state)

    def _restore(self, state: MemberState) -> None:
        membership = self._membership
        place = membership.nodes, membership.devices, membership.rank
        try:
            self._turns.restore(state.turns)
        except ValueError as error:
            raise SnapshotError(
                f"the worker's saved state must have valid turns. Received: {state.turns}", worker=membership.worker
            ) from error
        if state.place != place:
            raise SnapshotError(
                f"the worker's saved state must be of rank {place[2]} in {place[0]} nodes of {place[1]}. "
                f"Received: {state.place}",
                worker=membership.worker,
            )
        self.theta, self._velocity = state.theta, state.velocity
        self._replica.load(self.theta)
        if state.statistics.size:
            self._replica.load_moving_statistics(state.statistics)
        if state.optimizer is not None:
            self._optimizer = OptimizerState(state.optimizer, state.content, zlib.crc32(state.content.data))
        in_flight = self._turns.in_flight
        if in_flight is not None and in_flight.group == membership.device:
            if not state.sent.size:
                raise SnapshotError(
                    f"the worker's saved state must have the vector that it sent after step {in_flight.batch}. "
                    "Received: none",
                    worker=membership.worker,
                )
            self._send(in_flight.batch, state.sent)

    def state(self, node: str, statistics: int) -> MemberState:
        """Return the state at the end of an epoch."""
        membership, in_flight, sent = self._membership, self._turns.in_flight, np.empty(0, np.float32)
        if in_flight is not None and in_flight.group == membership.device:
            assert self._sent is not None
            sent = self._sent
        moving_statistics = np.empty(statistics, np.float32)
        if statistics:
            self._replica.read_moving_statistics(moving_statistics)
        optimizer = self._replica.read_optimizer()
        return MemberState(
            node,
            (membership.nodes, membership.devices, membership.rank),
            self._turns.state(),
            None if optimizer is None else optimizer.layout,
            self.theta,
            self._velocity,
            sent,
            moving_statistics,
            np.empty(0, np.uint8) if optimizer is None else optimizer.content,
        )

    @property
    def size(self) -> int:
        return self._replica.size

    @property
    def learning_rate(self) -> float:
        return self._replica.learning_rate

    def load(self, vector: Vector) -> None:
        """Begin from ``vector``, unless a state was restored."""
        if not self._restored:
            self.theta[...] = vector
            self._replica.load(self.theta)

    def read(self, out: Vector) -> None:
        out[...] = self.theta

    def moved(self, since: Vector, out: Vector) -> None:
        np.subtract(self.theta, since, out=out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """Set the moving statistics, unless a state was restored."""
        if not self._restored:
            self._replica.load_moving_statistics(vector)

    def read_moving_statistics(self, out: np.ndarray) -> None:
        self._replica.read_moving_statistics(out)

    def set_values(self, values: np.ndarray) -> None:
        """Do nothing: the server refuses to set values for members, which must have the same ones at each step."""

    def gradient(self, batch: BatchLike, out: Vector) -> np.ndarray:
        return self._replica.gradient(batch, out)

    def train(self, batches: Sequence[BatchLike]) -> np.ndarray:
        """Take one step of the node for each batch; after this member's last batch, also the node's remaining steps.

        Return loss and metrics of this member's mini-batches, float64 ``(len(batches), metrics)``.
        """
        rows = []
        self._load_optimizer(batches[0])
        for batch in batches:
            rate = self.learning_rate
            gradient = self._links.memory_of_gradient()
            row = self.gradient(batch, gradient)
            if not all_finite(gradient):  # in a sum, it would reach every member
                raise NonFiniteError(
                    f"the gradient of mini-batch {batch.index} of epoch {batch.epoch} must be finite. Lower the "
                    "learning rate or clip gradients",
                    worker=self._membership.worker,
                    step=batch.index,
                )
            rows.append(row)
            self._loss, self._samples = self._loss + float(row[0]) * batch.size, self._samples + batch.size
            self._step(batch.epoch, batch.index, gradient, rate)
            if batch.last:
                for index in range(batch.index + 1, self._membership.batches):
                    self._step(batch.epoch, index, None, self.learning_rate)
                self._end_epoch(batch.epoch)
        return np.stack(rows)

    def _load_optimizer(self, example: BatchLike) -> None:
        state, self._optimizer = self._optimizer, None
        if state is not None and (problem := self._replica.load_optimizer(state, example)):
            raise SnapshotError(
                f"the saved state of the optimizer must fit this model's optimizer: {problem}",
                worker=self._membership.worker,
                step=example.index,
            )

    def _step(self, epoch: int, index: int, gradient: Vector | None, learning_rate: float) -> None:
        """Take the node's step number ``index`` of ``epoch``, and exchange as the rule decides."""
        step = epoch * self._membership.batches + index
        total, members, rate = self._links.sum_gradients(step, gradient, learning_rate)
        if members:
            local_step(self.theta, self._velocity, total, members, rate, self._daso.momentum)
        self._synchronize(step, self._turns.after(step, self._daso.phase(epoch, self._epochs)))
        self._replica.load(self.theta)

    def _synchronize(self, step: int, turn: Turn) -> None:
        links, device, nodes = self._links, self._membership.device, self._membership.nodes
        if turn.block is not None:
            total = None
            if turn.block == device:
                links.wait_for_posted(step)  # the last exchange of the cycling phase is discarded
                total = links.sum_parameters(step, self.theta, cast=self._daso.cast)
            self.theta = links.broadcast(step, turn.block, total) / nodes
        if turn.merge is not None:
            total = links.collect(step) if turn.merge.group == device else None
            total = links.broadcast(step, turn.merge.group, total)
            self.theta = merge(self.theta, total, nodes, turn.merge.wait)
        if turn.send is not None and turn.send.group == device:
            self._send(step, self.theta.copy())

    def _send(self, step: int, theta: Vector) -> None:
        self._sent = theta
        self._links.post(step, theta)

    def _end_epoch(self, epoch: int) -> None:
        phase, step = self._daso.phase(epoch, self._epochs), (epoch + 1) * self._membership.batches - 1
        if phase == CYCLING:
            self._turns.judge(phase, self._links.mean_loss(step, self._loss, self._samples))
        self._loss, self._samples = 0.0, 0.0


def run_member(  # noqa: PLR0913 - independent facts of one worker, which callers name
    daso: Daso,
    replica: MemberModel,
    batches: Iterator[BatchLike],
    payload: Callable[[], tuple[Vector, ...]],
    *,
    welcome: Welcome,
    worker: int,
    node: str,
    epochs: int,
    meet: Callable[[str], MemberLinks | None],
    moving_statistics: int = 0,
    now: Callable[[], float] | None = time.time,
    make: Callable[..., MemberReplica] = MemberReplica,
) -> Loop:
    """Run `loop.work` as a member of the current membership, from the partition's progress.

    Args:
        node: the name of the member's node, unless a state names it.
        meet: announces the member as one of the named node, and returns its connections to the others, which this
            closes; None: the job ends early.
    """
    if welcome.epoch >= epochs:
        return
    state: MemberState | None = None
    if welcome.sequence:
        reply: Any = yield FetchRequest()
        sizes = replica.size, moving_statistics
        state = MemberState.decode(reply.optimizer, welcome.sequence, sizes, worker)
        node = state.node
    links = meet(node)
    if links is None:
        return
    try:
        member = make(daso, replica, links, epochs, state)
        reply = None
        steps = work(daso, member, batches, payload, moving_statistics=moving_statistics, now=now)
        while True:
            try:
                request = steps.send(reply)
            except StopIteration:
                return
            if isinstance(request, CommitRecord):
                yield KeepRequest(member.state(node, moving_statistics).encode(), ahead=True)
            reply = yield request
    finally:
        links.close()
