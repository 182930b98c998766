"""The worker's half of DASO: a replica whose every step is its node's, and which exchanges with other nodes.

`rules.daso` decides what follows after which batch; `transport.members` carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from distkeras.ps.errors import NonFiniteError
from distkeras.ps.rules.base import Vector
from distkeras.ps.rules.daso import CYCLING, Daso, Turn, Turns, local_step, merge
from distkeras.ps.transport.members import MemberLinks

if TYPE_CHECKING:
    from distkeras.ps.worker.loop import BatchLike, WorkerReplica


class MemberReplica:
    """A replica that trains as a member of a node; see `loop.WorkerReplica`.

    Args:
        daso: the rule.
        replica: the model, which gives gradients.
        links: to the other members, connected.
        epochs: of the job.

    Attributes:
        theta: the node's parameters, shape ``(size,)``, float32.
    """

    def __init__(self, daso: Daso, replica: WorkerReplica, links: MemberLinks, epochs: int) -> None:
        membership = links.membership
        self._daso, self._replica, self._links, self._epochs = daso, replica, links, epochs
        self._membership = membership
        self._turns = Turns(daso, membership.nodes, membership.devices)
        self.theta: Vector = np.zeros(replica.size, np.float32)
        self._velocity = np.zeros_like(self.theta)
        self._gradient = np.empty_like(self.theta)
        #: Of the present epoch: the sum of the losses of this member's samples, and their number.
        self._loss, self._samples = 0.0, 0.0

    @property
    def size(self) -> int:
        """The elements of the vector."""
        return self._replica.size

    @property
    def learning_rate(self) -> float:
        """The local optimizer's current learning rate."""
        return self._replica.learning_rate

    def load(self, vector: Vector) -> None:
        """Begin from ``vector``."""
        self.theta[...] = vector
        self._replica.load(self.theta)

    def read(self, out: Vector) -> None:
        """Write the node's parameters into ``out``."""
        out[...] = self.theta

    def moved(self, since: Vector, out: Vector) -> None:
        """Write the parameters less ``since`` into ``out``."""
        np.subtract(self.theta, since, out=out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """Set the moving statistics."""
        self._replica.load_moving_statistics(vector)

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """Write them into ``out``."""
        self._replica.read_moving_statistics(out)

    def gradient(self, batch: BatchLike, out: Vector) -> np.ndarray:
        """Write this member's gradient into ``out``."""
        return self._replica.gradient(batch, out)

    def train(self, batches: Sequence[BatchLike]) -> np.ndarray:
        """Take one step of the node a batch; with an epoch's last batch also those that other members still have.

        Returns:
            float64 ``(len(batches), metrics)``: loss and metrics of this member's mini-batches.

        Raises:
            MemberLostError: another member is lost.
            NonFiniteError: the gradient has a NaN or infinity.
        """
        rows = []
        for batch in batches:
            rate = self.learning_rate
            row = self.gradient(batch, self._gradient)
            if not np.isfinite(self._gradient).all():  # once it is in a sum, it is every member's
                raise NonFiniteError(
                    f"the gradient of mini-batch {batch.index} of epoch {batch.epoch} must be finite. Lower the "
                    "learning rate or clip gradients",
                    worker=self._membership.places[self._membership.rank][0],
                    step=batch.index,
                )
            rows.append(row)
            self._loss, self._samples = self._loss + float(row[0]) * batch.size, self._samples + batch.size
            self._step(batch.epoch, batch.index, self._gradient, rate)
            if batch.last:
                for index in range(batch.index + 1, self._membership.batches):
                    self._step(batch.epoch, index, None, self.learning_rate)
                self._end_epoch(batch.epoch)
        return np.stack(rows)

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
                links.settle(step)  # what cycling has sent last is dropped
                total = links.sum_parameters(step, self.theta, cast=self._daso.cast)
            self.theta = links.hand_down(step, turn.block, total) / nodes
        if turn.merge is not None:
            total = links.collect(step) if turn.merge.group == device else None
            total = links.hand_down(step, turn.merge.group, total)
            self.theta = merge(self.theta, total, nodes, turn.merge.wait)
        if turn.send is not None and turn.send.group == device:
            links.post(step, self.theta.copy())

    def _end_epoch(self, epoch: int) -> None:
        phase, step = self._daso.phase(epoch, self._epochs), (epoch + 1) * self._membership.batches - 1
        if phase == CYCLING:
            self._turns.judge(phase, self._links.mean_loss(step, self._loss, self._samples))
        self._loss, self._samples = 0.0, 0.0
