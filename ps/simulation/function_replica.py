"""The model of virtual workers: a vector whose gradients a function computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.base import CALL_STEPS_MAX, Vector

#: ``gradient(theta, worker)``
Gradient = Callable[[Vector, int], Vector]
#: ``gradient(theta, worker, batch)``, with the number of the worker's mini-batch.
NumberedGradient = Callable[[Vector, int, int], Vector]

_NO_METRICS = np.empty((CALL_STEPS_MAX, 0))
_NO_METRICS_OF_ONE = np.empty(0)


@dataclass(slots=True)
class VirtualBatch:
    """A mini-batch without arrays: the gradient function receives only its number."""

    index: int
    epoch: int = 0
    last: bool = False
    size: int = 1
    checksum: int = 0


def checked_gradient(gradient: Callable[..., Vector], theta: Vector, *numbers: int) -> Vector:
    """Return ``gradient(theta, *numbers)``; raise a `ConfigurationError` if it has another shape than ``theta``."""
    value = gradient(theta, *numbers)
    if value.shape != theta.shape:
        raise ConfigurationError(f"`gradient` must return shape {theta.shape}. Received: {value.shape}")
    return value


class FunctionReplica:
    """Plain SGD on a vector with gradients from a function. A loaded vector is immutable; the first step copies it."""

    def __init__(self, size: int, learning_rate: float, gradient: Callable[[Vector, int], Vector]) -> None:
        self.size = size
        self.learning_rate = learning_rate
        self._gradient = gradient
        self._theta: Vector = np.empty(0)
        self._own = False

    def load(self, vector: Vector) -> None:
        """Use ``vector``, which must not change, as the parameters."""
        self._theta, self._own = vector, False

    def read(self, out: Vector) -> None:
        """Write the parameters into ``out``."""
        out[...] = self._theta

    def moved(self, since: Vector, out: Vector) -> None:
        """Write the parameters minus ``since`` into ``out``."""
        np.subtract(self._theta, since, out=out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """Do nothing: a function has no moving statistics."""

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """Do nothing: a function has no moving statistics."""

    def set_values(self, values: np.ndarray) -> None:
        """Set the learning rate, which is place 0."""
        self.learning_rate = dict(values.tolist()).get(0, self.learning_rate)

    def train(self, batches: Sequence[Any]) -> np.ndarray:
        """Take one step for each batch."""
        for batch in batches:
            step = self.learning_rate * self._gradient(self._theta, batch.index)
            if self._own:
                self._theta -= step
            else:
                self._theta, self._own = (self._theta - step).astype(self._theta.dtype, copy=False), True
        return _NO_METRICS[: len(batches)]

    def gradient(self, batch: Any, out: Vector) -> np.ndarray:
        """Write the gradient into ``out``."""
        out[...] = self._gradient(self._theta, batch.index)
        return _NO_METRICS_OF_ONE
