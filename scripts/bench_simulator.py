"""Commits a second of the simulator beside those of the arithmetic alone: 128 virtual workers under ASGD, float32."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma

WORKERS = 128
ETA = 0.01


def measure(size: int = 100_000, commits: int = 2000, repeats: int = 9) -> tuple[float, float, float]:
    """Runs both in turn; the gradient is a constant vector, which both copy.

    Args:
        size: parameters.
        commits: in one run.
        repeats: runs of each.

    Returns:
        Medians: commits a second of the arithmetic, of the simulator, and the ratio of neighboring runs.
    """
    gradient = np.random.default_rng(0).normal(scale=1e-3, size=size).astype(np.float32)
    start = np.ones(size, np.float32)

    def arithmetic() -> None:
        versions = [np.empty_like(start) for _ in range(WORKERS + 3)]
        theta = start
        for commit in range(commits):
            payload = versions[commit % len(versions)]
            payload[...] = gradient
            payload *= ETA
            theta = np.subtract(theta, payload, out=payload)

    def simulator() -> None:
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

    pairs = [(rate(arithmetic), rate(simulator)) for _ in range(repeats + 1)][1:]  # the first warms up
    alone, simulated = zip(*pairs, strict=True)
    ratio = statistics.median(s / a for a, s in pairs)
    return statistics.median(alone), statistics.median(simulated), ratio


if __name__ == "__main__":
    alone, simulated, ratio = measure()
    sys.stdout.write(f"arithmetic {alone:.0f}/s, simulator {simulated:.0f}/s, ratio {ratio:.2f}\n")
