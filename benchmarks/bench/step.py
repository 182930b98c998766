"""Training steps of a worker, without Spark and without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from bench.gpu_process import Workload, best_fit
from bench.measure import Case, Factory
from bench.workload import bare_loop, build, mini_batches, rows
from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica

SECTION = "step"
WINDOW = 10
#: Steps of one run, which take about a second.
STEPS = {("M", 32): 200, ("M", 128): 100, ("S", 32): 2000, ("S", 128): 1000}
TURNS = 3


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    share = 5 if quick else 1
    return [partial(_steps, name, batch, count // share) for (name, batch), count in STEPS.items()]


@contextmanager
def _steps(name: str, batch: int, count: int) -> Iterator[Case]:
    """Yield the case of `KerasReplica.train`, a window at a time, on batches in the form of the data plane."""
    import tensorflow as tf

    x, y = rows(count * batch)

    def windows() -> list[list[Batch]]:
        batches = mini_batches(x, y, batch, WINDOW)
        return [batches[start : start + WINDOW] for start in range(0, count, WINDOW)]

    replica = KerasReplica(build(name))
    bare = bare_loop(build(name), batch)
    stacks = [
        tuple(tf.constant(np.stack(part)) for part in zip(*((b.x[0], b.y[0]) for b in window), strict=True))
        for window in windows()
    ]

    def ours() -> float:
        fresh = windows()  # TensorFlow has not taken over their memory yet.
        began = time.perf_counter()
        for window in fresh:
            replica.train(window)
        return count / (time.perf_counter() - began)

    def limit() -> float:
        began = time.perf_counter()
        for stack in stacks:
            bare(*stack)
        return count / (time.perf_counter() - began)

    for side in (ours, limit):
        side()
    with best_fit(Workload(name, batch, count)) as (naive, which):
        name = f"{name}, batches of {batch}, windows of {WINDOW}"
        note = f"limit: each window one call of a compiled loop over tensors that are there already; naive: {which}"
        yield Case(SECTION, name, "steps/s", ours, limit, naive, target_limit=0.95, turns=TURNS, note=note)
