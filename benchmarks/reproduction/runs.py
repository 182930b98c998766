"""Training runs of the perceptron under a rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from distkeras.ps import rules
from distkeras.ps.rules.schedules import Schedule, StepDecay, WarmUp
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma, SlowWorkers, Timing
from distkeras.ps.simulation.virtual_job import Trace
from reproduction import network

#: The environments of the papers, by the names in the report.
TIMINGS: dict[str, Timing] = {
    "homogeneous": Gamma(),
    "heterogeneous": Gamma(heterogeneous=True),
    "slow workers": SlowWorkers(),
    "one slow worker": SlowWorkers(share=1 / 8, factor=4.0),
    "equal workers": SlowWorkers(share=0.0),
}
#: Points of a curve in ``results.json``.
CURVE = 40


@dataclass(frozen=True)
class Run:
    """One training run, except for its seed.

    Args:
        rule: its name.
        workers: n.
        rate: the highest learning rate.
        gradients: mini-batches in all, which are shared by the workers' windows. If windows follow the workers' speeds,
            their number is computed as if all workers were as fast as the fastest.
        timing: a key of `TIMINGS`.
        options: the rule's hyper-parameters.
        decay: multiply the rate by a tenth after a half and after three quarters of the commits, as in papers.
        warm_up: raise the rate from ``rate / workers`` over the first sixteenth, as in DANA's runs.
        gap: measure the gap.
    """

    rule: str
    workers: int
    rate: float
    gradients: int
    timing: str = "homogeneous"
    options: tuple[tuple[str, Any], ...] = ()
    decay: bool = False
    warm_up: bool = False
    gap: bool = False

    @property
    def commits(self) -> int:
        """Return the number of commits; for a synchronous rule, a multiple of the workers."""
        rule = rules.make(self.rule, **dict(self.options))
        window = rule.window_by_speed or rule.window
        assert isinstance(window, int), "a simulation has no epochs"
        commits = max(1, self.gradients // window)
        # An incomplete round does not move the center.
        return -(-commits // self.workers) * self.workers if rule.traits.synchronous else commits

    @property
    def learning_rate(self) -> float | Schedule:
        """Return the learning rate as a function of the clock."""
        places = {self.commits // 2, self.commits * 3 // 4} if self.decay else set()
        boundaries = tuple(sorted(places))
        if self.warm_up:
            length = max(1, self.commits // 16)
            return WarmUp(self.rate, boundaries, length=length, divisor=float(self.workers))
        return StepDecay(self.rate, boundaries) if self.decay else self.rate


def simulated(run: Run, seed: int) -> tuple[Trace, network.Batches]:
    """Return the trace of a run, and the gradients that it computed."""
    batches, rule = network.Batches(seed), rules.make(run.rule, **dict(run.options))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # Divergence is a valid outcome.
        trace = simulate(
            rule,
            network.initial(seed),
            batches.numbered if rule.may_refuse else batches,
            workers=run.workers,
            learning_rate=run.learning_rate,
            timing=TIMINGS[run.timing],
            steps=run.commits,
            seed=seed,
            dtype=np.float32,
            numbered=rule.may_refuse,
            measure_gap=run.gap,
        )
    return trace, batches


def train(run: Run, seed: int, part: str = "test") -> dict[str, Any]:
    """Return the figures of one run, which are plain numbers. The model is evaluated on ``part``."""
    trace, batches = simulated(run, seed)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        loss, accuracy = network.evaluate(trace.theta, part)
        steps = history(trace, batches)
        late = steps.sort_values("seconds").tail(max(1, len(steps) // 10))
        time, curve = smoothed(steps)
        return {
            "accuracy": accuracy,
            "loss": loss,
            "diverged": bool(loss > network.GUESSING),
            "training accuracy": float(late["accuracy"].mean()),
            "training loss": float(late["loss"].mean()),
            "time": float(trace.time[-1]),
            "staleness": float(trace.staleness.mean()),
            "scale": float(trace.scale.mean()),
            "gap": float(trace.gap.mean()),
            "normalized gap": float(np.median(trace.normalized_gap)),
            "curve": [time, curve],
        }


def history(trace: Trace, batches: network.Batches) -> pd.DataFrame:
    """Return a row for each gradient whose commit was applied, in the form that `distkeras.analysis.metrics` takes.

    The steps of a window share the time between the worker's two commits evenly. ``seconds`` are units of the timing.
    """
    worker_of_gradient, parts = np.array(batches.worker), []
    loss, accuracy = np.array(batches.loss), np.array(batches.accuracy)
    for worker in range(worker_of_gradient.max() + 1):
        own = trace.worker == worker
        steps = trace.steps[own]
        begun = np.concatenate([[0.0], trace.time[own]])
        spans = np.repeat(np.diff(begun) / steps, steps)
        times = np.repeat(begun[:-1], steps) + spans * np.concatenate([np.arange(1, step + 1) for step in [*steps, 0]])
        places = np.flatnonzero(worker_of_gradient == worker)[: len(times)]
        columns = {"worker": worker, "iteration": np.arange(len(times)), "seconds": times}
        parts.append(pd.DataFrame({**columns, "loss": loss[places], "accuracy": accuracy[places]}))
    frame = pd.concat(parts, ignore_index=True)
    return frame.assign(epoch=0, samples=network.BATCH, timestamp=pd.to_datetime(frame["seconds"], unit="s"))


def smoothed(steps: pd.DataFrame) -> tuple[list[float], list[float]]:
    """Return the training accuracy over time: means over as many spans as a curve has points."""
    ordered = steps.sort_values(["seconds", "worker"])
    parts = np.array_split(ordered[["seconds", "accuracy"]].to_numpy(), min(CURVE, len(ordered)))
    means = [part.mean(axis=0) for part in parts]
    return [round(float(mean[0]), 1) for mean in means], [round(float(mean[1]), 4) for mean in means]
