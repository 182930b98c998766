"""A process that runs Keras on one backend, and what is measured in it: the best `fit`, and the section "gpu".

A process cannot change its backend, and the process of the command line needs none: it must not reserve a GPU's memory.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from bench import whole_job
from bench.processes import Caller
from bench.workload import fit_rate, mini_batches, rows
from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules import make
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker, work
from distkeras.spark.task_process import prepare_process

if TYPE_CHECKING:
    import keras

RULE = "agn"
METRICS = ("loss", "accuracy")
#: The ``steps_per_execution`` that are tried; Keras on PyTorch refuses any but 1, and on JAX it unrolls the steps, so
#: that large models and convolutions take minutes to compile.
EXECUTIONS = {"S": (1, 10, 50), "M": (1, 10), "C": (1, 10), "R": (1, 10)}


@dataclass(frozen=True)
class Workload:
    """A model and its mini-batches.

    Args:
        model: "S" or "M" (see `whole_job.HIDDEN`); "C": two convolutions of 32 and 64 filters over 28 x 28 pixels; "R":
            an LSTM of 64 units over the 28 lines of an image.
        batch: rows of a mini-batch.
        steps: steps of one timed run.
        policy: the dtype policy of the model.
    """

    model: str
    batch: int
    steps: int
    policy: str = "float32"


class BackendProcess(Caller):
    """A process with one backend, and the variables that a training task sets; else all is as a user has it."""

    def __init__(self, backend: str, *, of_task: bool = True) -> None:
        super().__init__()
        self.call(_choose, backend, of_task)


def _choose(backend: str, of_task: bool) -> None:
    os.environ["KERAS_BACKEND"] = backend
    if of_task:
        prepare_process(4)  # This is the number of its threads on processors.


def build(workload: Workload, steps_per_execution: int = 1) -> keras.Model:
    """Return the model, with the same weights each time, and a rate so small that no rule diverges on random labels."""
    import keras

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(workload.policy)
    layers = []
    if workload.model == "C":
        layers = [keras.layers.Reshape((28, 28, 1))]
        for filters in (32, 64):
            layers += [keras.layers.Conv2D(filters, 3, activation="relu"), keras.layers.MaxPooling2D()]
        layers += [keras.layers.Flatten()]
    elif workload.model == "R":
        layers = [keras.layers.Reshape((28, 28)), keras.layers.LSTM(64)]
    return whole_job.build(workload.model, 1e-3, steps_per_execution, layers)


_replica = cache(lambda workload: KerasReplica(build(workload)))
_plain = cache(build)
_rows = cache(rows)


def _batches(workload: Workload, window: int, count: int = 0) -> list[Batch]:
    count = count or workload.steps
    return mini_batches(*_rows(count * workload.batch), workload.batch, window, epoch=0)


def replica_rate(workload: Workload, window: int) -> float:
    """Return the steps a second of `KerasReplica.train`, a window at a time."""
    replica, batches = _replica(workload), _batches(workload, window)
    began = time.perf_counter()
    for start in range(0, len(batches), window):
        replica.train(batches[start : start + window])
    return len(batches) / (time.perf_counter() - began)


def keras_rate(workload: Workload, steps_per_execution: int) -> float:
    """Return the steps a second of ``fit``."""
    x, y = _rows(workload.steps * workload.batch)
    return fit_rate(_plain(workload, steps_per_execution), x, y, workload.batch) / workload.batch


def fastest_fit(workload: Workload, choices: tuple[int, ...]) -> int:
    """Return the ``steps_per_execution`` with which ``fit`` is fastest; afterwards all of them are compiled."""
    for choice in choices:
        keras_rate(workload, choice)
    return max(choices, key=lambda choice: keras_rate(workload, choice))


@contextmanager
def best_fit(workload: Workload) -> Iterator[tuple[Callable[[], float], str]]:
    """Yield a function that measures the steps a second of the fastest ``fit``, and what is fastest.

    It is the best of `EXECUTIONS` on TensorFlow and, where it is installed, JAX, each in a process with all cores.
    """
    with ExitStack() as stack:
        found = []
        for backend in filter(importlib.util.find_spec, ("tensorflow", "jax")):
            process = stack.enter_context(BackendProcess(backend, of_task=False))
            best = process.call(fastest_fit, workload, EXECUTIONS[workload.model])
            rate = partial(process.call, keras_rate, workload, best)
            found.append((rate(), rate, f"fit on {backend} with steps_per_execution={best}"))
        _, rate, text = max(found, key=lambda each: each[0])
        tried = " and ".join(name for _, _, name in found)
        yield rate, f"{text}, the best of {EXECUTIONS[workload.model]} ({tried})"


def distances(workload: Workload, steps: int) -> tuple[float, float]:
    """Return how far the largest weights are from those of a plain model after the same steps.

    First of a replica that took them as one window, then of another plain model: how far a device repeats its results.
    """
    batches = _batches(workload, steps, steps)
    replica = KerasReplica(build(workload))
    replica.train(batches)
    weights = [_weights(replica)]
    for _ in range(2):
        model = build(workload)
        for batch in batches:
            model.reset_metrics()
            model.train_on_batch(batch.x[0], batch.y[0])
        weights.append(_weights(KerasReplica(model)))
    ours, first, second = weights
    return float(np.abs(ours - first).max()), float(np.abs(second - first).max())


def _weights(replica: KerasReplica) -> np.ndarray:
    vector = replica.layout.empty()
    replica.read(vector)
    return vector


def copy_rate(workload: Workload, count: int) -> float:
    """Return how often a second the weights go to the host and back; each copy waits for the one before."""
    replica = _replica(workload)
    vector = _weights(replica)
    began = time.perf_counter()
    for _ in range(count):
        replica.load(vector)
        replica.read(vector)
    return count / (time.perf_counter() - began)


def initial_weights(workload: Workload) -> np.ndarray:
    """Return the weights with which a job begins."""
    return _weights(KerasReplica(build(workload)))


def train_in_job(workload: Workload, address: Address, number: int, window: int) -> None:
    """Train as worker ``number`` of a job, for one epoch."""
    rule, replica, batches = make(RULE, window=window), _replica(workload), _batches(workload, window)
    parts = rule.traits.parts
    client = WorkerClient(address, worker=number, attempt=0, size=replica.size, metrics=METRICS, shared_parts=parts)

    def begin(_: Welcome) -> Loop:
        return work(rule, replica, iter(batches), lambda: client.payload(parts))

    try:
        run_worker(client, client.join(), begin)
    finally:
        client.close()
