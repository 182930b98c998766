"""Plain Keras at its best: `fit` with the backend and the `steps_per_execution` that are fastest on this machine.

With one step for each execution, which is Keras' default, `fit` returns to Python after every mini-batch. A small model
is then several times slower than with ten steps or more, and a comparison with it would say little.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import numpy as np

#: Steps of one execution that are tried.
STEPS = (1, 10, 50)
#: Seconds that another process may take for all its measurements.
_PATIENCE = 300.0

#: Returns a compiled model, given `steps_per_execution`.
Builder = Callable[[int], "keras.Model"]


@dataclass(frozen=True)
class FitRate:
    """The speed of `fit` over one epoch, without the time in which the step is compiled."""

    backend: str
    steps: int
    rows_per_second: float

    @property
    def label(self) -> str:
        """Return a description, such as "TensorFlow, steps_per_execution=10"."""
        name = {"tensorflow": "TensorFlow", "jax": "JAX"}.get(self.backend, self.backend)
        return f"{name}, steps_per_execution={self.steps}"


def rates(build: Builder, x: np.ndarray, y: np.ndarray, batch_size: int) -> list[FitRate]:
    """Return the speed of `fit` for each ``steps_per_execution``, on TensorFlow and, if it is installed, on JAX.

    ``build`` is a function at the top level of a module: on JAX, it is called in a process of its own.
    """
    found = rates_here(build, x, y, batch_size)
    if found[0].backend != "jax" and importlib.util.find_spec("jax") is not None:
        found += _rates_on("jax", build, x, y, batch_size)
    return found


def rates_here(build: Builder, x: np.ndarray, y: np.ndarray, batch_size: int) -> list[FitRate]:
    """Return the speed of `fit` on the backend of this process; see `rates`."""
    import keras

    return [FitRate(keras.backend.backend(), each, _rate(build(each), x, y, batch_size)) for each in STEPS]


def best_of(found: Sequence[FitRate]) -> FitRate:
    """Return the fastest."""
    return max(found, key=lambda each: each.rows_per_second)


def epoch_ends(model: keras.Model, x: np.ndarray, y: np.ndarray, **options: Any) -> tuple[list[float], Any]:
    """Call `fit` with ``options``; return the time of each epoch's end, in seconds since the epoch, and its history."""
    import keras

    ends: list[float] = []

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.time())

    history = model.fit(x, y, verbose=0, callbacks=[Clock()], **options).history
    return ends, history


def _rate(model: keras.Model, x: np.ndarray, y: np.ndarray, batch_size: int) -> float:
    """Return the rows per second of the second of two epochs; the first one compiles the step."""
    (first, second), _ = epoch_ends(model, x, y, batch_size=batch_size, epochs=2)
    return len(x) / (second - first)


def _rates_on(backend: str, *arguments: Any) -> list[FitRate]:
    """Return `rates_here` of a process with another backend, which Keras chooses when it is first imported."""
    with get_context("spawn").Pool(1, _choose, (backend,)) as pool:
        try:
            return pool.apply_async(rates_here, arguments).get(_PATIENCE)
        except multiprocessing.TimeoutError:
            raise TimeoutError(f"`fit` on {backend} must end within {_PATIENCE:g} s; see log.txt") from None


def _choose(backend: str) -> None:
    os.environ["KERAS_BACKEND"] = backend
