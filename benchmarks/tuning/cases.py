"""One run in the simulator, and the runs of each figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from reproduction import network
from reproduction.runs import history

from distkeras.ps import rules
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Communication, Gamma

#: Figures of each run by the name of its case.
Results = Mapping[str, Mapping[str, float]]

#: Mini-batches of a run, shared by its workers: seven epochs of Fashion-MNIST.
BUDGET = 12_000
#: The training accuracy whose time is compared, as a mean over `SPAN` mini-batches.
TARGET, SPAN = 0.8, 200
SEEDS = (1, 2, 3)
#: Learning rates of the workers' plain SGD.
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
WINDOW = 10
WORKERS = (1, 2, 4, 8, 16, 32)
#: The time of an exchange at the server, which does one at a time, in mean times of a step.
SERVICES = (0.0, 1.0)
WINDOWS = (1, 2, 5, 10, 20, 50)
#: The time of a commit and its reply on the network, in mean times of a step.
TRAVELS = (0.0, 2.0, 10.0)
WORKERS_OF_WINDOWS = 8


@dataclass(frozen=True, order=True)
class Case:
    """One run of the rule "agn".

    Of one exchange, ``travel`` is the time on the network and ``service`` that of the server, in mean times of a step.
    """

    workers: int
    window: int
    rate: float
    travel: float = 0.0
    service: float = 0.0
    seed: int = 1

    @property
    def name(self) -> str:
        """Return the key of its result."""
        return "/".join(f"{value:g}" for value in astuple(self))


def run(case: Case) -> dict[str, Any]:
    """Return the test accuracy after the budget, and the time to the target in mean step times; infinite if never."""
    batches = network.Batches(case.seed)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # Divergence is a valid outcome.
        trace = simulate(
            rules.make("agn", window=case.window),
            network.initial(case.seed),
            batches,
            workers=case.workers,
            learning_rate=case.rate,
            timing=Gamma(mean=1.0),
            communication=Communication(latency=case.travel / 2, service=case.service),
            steps=max(1, BUDGET // case.window),
            seed=case.seed,
            dtype=np.float32,
        )
        steps = history(trace, batches).sort_values(["seconds", "worker"])
        means = steps["accuracy"].rolling(SPAN).mean().to_numpy()
        reached = np.flatnonzero(means >= TARGET)
        return {
            "accuracy": network.evaluate(trace.theta)[1],
            "time": float(steps["seconds"].to_numpy()[reached[0]]) if len(reached) else math.inf,
        }


def of_workers() -> list[Case]:
    """Return the cases of each number of workers, with each time at the server, at each rate."""
    return [Case(n, WINDOW, rate, 0.0, service, seed)
            for n in WORKERS for service in SERVICES for rate in RATES for seed in SEEDS]  # fmt: skip


def of_windows() -> list[Case]:
    """Return the cases of each window, with each time on the network, at each rate."""
    return [Case(WORKERS_OF_WINDOWS, window, rate, travel, 0.0, seed)
            for window in WINDOWS for travel in TRAVELS for rate in RATES[1:-1] for seed in SEEDS]  # fmt: skip


def mean(results: Results, key: str, cases: Iterable[Case]) -> float:
    """Return the mean of a figure over cases that differ in their seed."""
    return float(np.mean([results[case.name][key] for case in cases]))


def best_time(results: Results, workers: int, window: int, travel: float, service: float) -> tuple[float, float]:
    """Return the shortest mean time to the target over the learning rates, in mean step times, and its rate."""
    times = []
    for rate in RATES:
        cases = [Case(workers, window, rate, travel, service, seed) for seed in SEEDS]
        if cases[0].name in results:
            times.append((mean(results, "time", cases), rate))
    return min(times)
