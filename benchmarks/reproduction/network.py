"""The data and model of the virtual workers: Fashion-MNIST, and a small perceptron with a gradient in numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from distkeras.data.datasets import fashion_mnist

INPUTS, HIDDEN, CLASSES = 784, 32, 10
SIZE = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
BATCH = 32
#: Training rows without gradients: learning rates are chosen on them.
HELD_OUT = 5000
#: The loss of random guessing; a run that ends above it has diverged.
GUESSING = math.log(CLASSES)


class Data(NamedTuple):
    """Pictures as bytes, shape ``(rows, 784)``, and labels, shape ``(rows,)``."""

    x: np.ndarray
    y: np.ndarray


@cache
def data() -> dict[str, Data]:
    """Return the parts "train", "held out" and "test"."""
    (x, y), (x_test, y_test) = fashion_mnist()
    return {
        "train": Data(x[:-HELD_OUT], y[:-HELD_OUT]),
        "held out": Data(x[-HELD_OUT:], y[-HELD_OUT:]),
        "test": Data(x_test, y_test),
    }


def scaled(x: np.ndarray, dtype: type[np.floating[Any]] = np.float32) -> np.ndarray:
    """Return pixels scaled to [0, 1]."""
    pixels: np.ndarray = x.astype(dtype) * dtype(1 / 255)
    return pixels


def initial(seed: int) -> np.ndarray:
    """Return He's initialization, with biases 0: float32, shape ``(SIZE,)``."""
    rng = np.random.default_rng([seed, 1])
    theta = np.zeros(SIZE, np.float32)
    w1, _, w2, _ = layers(theta)
    w1[...] = rng.normal(0, math.sqrt(2 / INPUTS), w1.shape)
    w2[...] = rng.normal(0, math.sqrt(2 / HIDDEN), w2.shape)
    return theta


def layers(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return views of both layers' weights, ``(784, 32)`` and ``(32, 10)``, and biases, ``(32,)`` and ``(10,)``."""
    first, second = INPUTS * HIDDEN, INPUTS * HIDDEN + HIDDEN
    third = second + HIDDEN * CLASSES
    return (
        theta[:first].reshape(INPUTS, HIDDEN),
        theta[first:second],
        theta[second:third].reshape(HIDDEN, CLASSES),
        theta[third:],
    )


def forward(theta: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return hidden activations, ``(rows, 32)``, and logits minus the row's largest, ``(rows, 10)``."""
    w1, b1, w2, b2 = layers(theta)
    hidden = x @ w1
    hidden += b1
    np.maximum(hidden, 0, out=hidden)
    logits = hidden @ w2
    logits += b2
    logits -= logits.max(axis=1)[:, None]
    return hidden, logits


def gradient(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Return the gradient of the mean cross-entropy, ``(SIZE,)`` in the dtype of ``theta``, the loss, and the accuracy.

    The pixels, from 0 to 1, are ``(rows, 784)``, the labels ``(rows,)``.
    """
    hidden, logits = forward(theta, x)
    places = np.arange(len(y)) * CLASSES + y  # These are the places of the right classes in the flat array.
    right = logits.ravel()[places]
    error = np.exp(logits, out=logits)
    total = error.sum(axis=1)
    loss = float((np.log(total) - right).mean())
    error /= total[:, None]
    error.ravel()[places] -= 1
    error *= 1 / len(y)
    out = np.empty_like(theta)
    w1, b1, w2, b2 = layers(out)
    np.matmul(hidden.T, error, out=w2)
    error.sum(axis=0, out=b2)
    back = error @ layers(theta)[2].T
    back *= hidden > 0
    np.matmul(x.T, back, out=w1)
    back.sum(axis=0, out=b1)
    return out, loss, float((right == 0).mean())


def evaluate(theta: np.ndarray, part: str = "test") -> tuple[float, float]:
    """Return loss and accuracy in [0, 1]; for a model that is not finite, infinity and the accuracy of guessing."""
    if not np.isfinite(theta).all():
        return math.inf, 1 / CLASSES
    rows = data()[part]
    _, logits = forward(theta, scaled(rows.x))
    right = logits[np.arange(len(rows.y)), rows.y]
    loss = float(np.mean(np.log(np.exp(logits).sum(axis=1)) - right, dtype=np.float64))
    return (loss if math.isfinite(loss) else math.inf), float(np.mean(logits.argmax(axis=1) == rows.y))


@dataclass
class Batches:
    """The gradient function of a run. Each worker draws its mini-batches from its own generator.

    It records the worker, loss and accuracy of each gradient, in the order of the calls.
    """

    seed: int
    worker: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    _generators: dict[int, np.random.Generator] = field(default_factory=dict)
    _taken: dict[int, list[tuple[int, np.ndarray]]] = field(default_factory=dict)

    def __call__(self, theta: np.ndarray, worker: int) -> np.ndarray:
        """Return the gradient at ``theta`` on the next mini-batch of ``worker``."""
        return self._gradient(theta, self._add(worker))

    def numbered(self, theta: np.ndarray, worker: int, number: int) -> np.ndarray:
        """Return the gradient at ``theta`` on the worker's mini-batch ``number``, from 0.

        New ones come in the order of `__call__`; if it was used before, its figures are replaced.
        """
        taken = self._taken.setdefault(worker, [])
        if number == len(taken):
            taken.append(self._add(worker))
        return self._gradient(theta, taken[number])

    def _add(self, worker: int) -> tuple[int, np.ndarray]:
        """Return the place of the worker's next mini-batch in the lists, and its rows."""
        if worker not in self._generators:
            self._generators[worker] = np.random.default_rng([self.seed, 2, worker])
        rows = self._generators[worker].integers(0, len(data()["train"].y), BATCH)
        self.worker.append(worker)
        self.loss.append(math.nan)
        self.accuracy.append(math.nan)
        return len(self.worker) - 1, rows

    def _gradient(self, theta: np.ndarray, taken: tuple[int, np.ndarray]) -> np.ndarray:
        place, rows = taken
        train = data()["train"]
        out, self.loss[place], self.accuracy[place] = gradient(theta, scaled(train.x[rows]), train.y[rows])
        return out
