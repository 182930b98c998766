"""Training steps of a worker, without Spark and without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from bench.gpu_process import Workload, best_fit, build, replica_rate
from bench.measure import Case, Factory
from bench.workload import bare_loop, mini_batches, rows

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
    """Yield the case of a replica's steps, a window at a time, on batches in the form of the data plane."""
    import tensorflow as tf

    workload = Workload(name, batch, count)
    ours, bare = partial(replica_rate, workload, WINDOW), bare_loop(build(workload), batch)
    batches = mini_batches(*rows(count * batch), batch, WINDOW)
    stacks = [
        tuple(tf.constant(np.stack(part)) for part in zip(*((b.x[0], b.y[0]) for b in window), strict=True))
        for window in (batches[start : start + WINDOW] for start in range(0, count, WINDOW))
    ]

    def limit() -> float:
        began = time.perf_counter()
        for stack in stacks:
            bare(*stack)
        return count / (time.perf_counter() - began)

    for side in (ours, limit):
        side()
    with best_fit(workload) as (naive, which):
        name = f"{name}, batches of {batch}, windows of {WINDOW}"
        note = f"limit: each window one call of a compiled loop over tensors that are there already; naive: {which}"
        yield Case(SECTION, name, "steps/s", ours, limit, naive, target_limit=0.95, turns=TURNS, note=note)
