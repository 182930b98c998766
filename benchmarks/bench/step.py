"""Training steps of a worker, and reading and loading its weights, without Spark and without a server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from bench.measure import Case, Factory
from bench.workload import CLASSES, INPUTS, bare_loop, build, fit_rate, mini_batches, rows
from distkeras.data.batches import Batch
from distkeras.data.columns import Column
from distkeras.data.model_columns import example
from distkeras.data.spec import DataSpec
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.same_step import ROWS, GivenModel, require_same_step

SECTION = "step"
WINDOW = 10
#: Steps of one run, which take about a second.
STEPS = {("M", 32): 200, ("M", 128): 100, ("S", 32): 2000, ("S", 128): 1000}
EXCHANGES = 100
TURNS = 3


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    share = 5 if quick else 1
    steps = [partial(_steps, name, batch, count // share) for (name, batch), count in STEPS.items()]
    return [*steps, partial(_exchange, EXCHANGES // share), partial(_comparison, "S"), partial(_comparison, "M")]


@contextmanager
def _comparison(name: str) -> Iterator[Case]:
    """Yield the case of the comparison of the given model with the one that workers rebuild, before a job."""
    model = build(name)
    model_file = archive.to_bytes(model)
    rebuilt = recipe_of(model, model_file).build(model_file)
    spec = DataSpec(features=(Column("features", (INPUTS,)),), labels=(Column("label", (), "int32", classes=CLASSES),))
    given = GivenModel(model, dict.fromkeys(("optimizer", "loss", "metrics")))
    x, y = rows(ROWS)
    plain = [build(name), build(name)]
    for one in plain:
        one.run_eagerly = True
    seconds: list[float] = []

    def ours() -> float:
        began = time.perf_counter()
        require_same_step(given, rebuilt, spec, example(spec), gradient=False)
        seconds.append(time.perf_counter() - began)
        return 1 / seconds[-1]

    def limit() -> float:
        began = time.perf_counter()
        for one in plain:
            one.fit(x, y, batch_size=ROWS, verbose=0)
        return 1 / (time.perf_counter() - began)

    for side in (ours, limit):
        side()
    yield Case(
        SECTION,
        f"{name}, comparison of the given model with a worker's",
        "comparisons/s",
        ours,
        limit,
        turns=TURNS,
        note=lambda: f"{1e3 * statistics.median(seconds):.0f} ms; limit: one eager step of each by `fit`",
    )


@contextmanager
def _steps(name: str, batch: int, count: int) -> Iterator[Case]:
    """Yield the case of `KerasReplica.train`, a window at a time, on batches in the form of the data plane."""
    import tensorflow as tf

    x, y = rows(count * batch)

    def windows() -> list[list[Batch]]:
        batches = mini_batches(x, y, batch, WINDOW)
        return [batches[start : start + WINDOW] for start in range(0, count, WINDOW)]

    replica, plain = KerasReplica(build(name)), build(name)
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

    def naive() -> float:
        return fit_rate(plain, x, y, batch) / batch

    for side in (ours, limit, naive):
        side()
    yield Case(
        SECTION,
        f"{name}, batches of {batch}, windows of {WINDOW}",
        "steps/s",
        ours,
        limit,
        naive,
        target_limit=0.95,
        target_naive=2.0 if name == "S" else None,
        turns=TURNS,
        note="limit: each window one call of a compiled loop over tensors that are there already; naive: fit",
    )


@contextmanager
def _exchange(count: int) -> Iterator[Case]:
    """Yield the case of a worker's weights at an exchange: read the movement, load the center."""
    model = build("M")
    replica = KerasReplica(model)
    sent, delta = np.zeros((2, replica.size), np.float32)
    weights = np.zeros(replica.size, np.float32)
    replica.read(sent)
    parts = model.get_weights()

    def ours() -> float:
        began = time.perf_counter()
        for _ in range(count):
            replica.moved(sent, delta)
            replica.load(sent)
        return count / (time.perf_counter() - began)

    def limit() -> float:
        began = time.perf_counter()
        for _ in range(count):
            np.subtract(weights, sent, out=delta)
            np.copyto(weights, sent)
        return count / (time.perf_counter() - began)

    def naive() -> float:
        began = time.perf_counter()
        for _ in range(count):
            _ = [new - old for new, old in zip(model.get_weights(), parts, strict=True)]
            model.set_weights(parts)
        return count / (time.perf_counter() - began)

    for side in (ours, limit, naive):
        side()
    yield Case(
        SECTION,
        "M, movement out and center in",
        "exchanges/s",
        ours,
        limit,
        naive,
        target_naive=4.0,
        note="limit: the same on plain arrays; naive: get_weights, subtract, set_weights",
    )
