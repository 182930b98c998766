"""Commits a second of the simulator, compared with its arithmetic alone: 128 virtual workers under ASGD, float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from bench.measure import Case, Factory
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma

SECTION = "simulator"

WORKERS = 128
SIZE = 100_000
ETA = 0.01


def cases(quick: bool) -> list[Factory]:
    """Return the only case of the section."""
    return [partial(_simulator, 500 if quick else 2000)]


@contextmanager
def _simulator(commits: int) -> Iterator[Case]:
    """Yield the case of runs of ``commits`` commits; the gradient is a constant vector, which both sides copy."""
    gradient = np.random.default_rng(0).normal(scale=1e-3, size=SIZE).astype(np.float32)
    start = np.ones(SIZE, np.float32)

    def arithmetic() -> None:
        versions = [np.empty_like(start) for _ in range(WORKERS + 3)]
        theta = start
        for commit in range(commits):
            payload = versions[commit % len(versions)]
            payload[...] = gradient
            payload *= ETA
            theta = np.subtract(theta, payload, out=payload)

    def simulated() -> None:
        simulate(
            "asgd",
            start,
            lambda theta, worker: gradient,
            workers=WORKERS,
            learning_rate=ETA,
            timing=Gamma(),
            steps=commits,
            dtype=np.float32,
        )

    def rate(run: Callable[[], None]) -> float:
        began = time.perf_counter()
        run()
        return commits / (time.perf_counter() - began)

    for side in (simulated, arithmetic):
        side()
    yield Case(
        SECTION,
        f"ASGD, {WORKERS} virtual workers, {SIZE:,} parameters",
        "commits/s",
        partial(rate, simulated),
        partial(rate, arithmetic),
        note="limit: the arithmetic alone",
    )
