"""Claim 1: how stale commits are, and how long steps take."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma, Memoryless, SlowWorkers, Timing
from reproduction import draw
from reproduction.claims import Claim, Criteria, Job, Results, Scale, over_seeds
from reproduction.parts import Check, Figure, Section, Table
from reproduction.spreads import Spread, listed

TIMINGS: dict[str, Timing] = {
    "homogeneous": Gamma(),
    "heterogeneous": Gamma(heterogeneous=True),
    "slow workers": SlowWorkers(),
    "memoryless": Memoryless(),
}
WORKERS = (5, 10, 20, 40)
SHOWN = 20
COMMITS, DRAWS = 10_000, 100_000
TOLERANCE, GEOMETRIC, LATE = 0.01, 0.03, 1.25
PAPER_LATE = {"homogeneous": 1.0, "heterogeneous": 27.9}
EXACT_LATE = {"homogeneous": 0.94, "heterogeneous": 27.8}
LATE_TOLERANCE = {"homogeneous": 0.2, "heterogeneous": 1.0}


def staleness(kind: str, workers: int, commits: int, seed: int) -> dict[str, Any]:
    """Return the staleness of plain ASGD; it does not depend on the model."""
    zero = np.zeros(1)
    trace = simulate(
        "asgd",
        zero,
        lambda theta, worker: zero,
        workers=workers,
        learning_rate=1.0,
        timing=TIMINGS[kind],
        steps=commits,
        seed=seed,
    )
    tau = trace.staleness
    pulls = [int(np.flatnonzero(trace.worker == worker).max(initial=-1)) + 1 for worker in range(workers)]
    counts = np.bincount(tau, minlength=workers)
    values = np.arange(len(counts))
    stay = 1 - 1 / workers  # probability that the next commit is another worker's
    right = values >= workers - 1
    of_right = np.cumsum(counts[right]) / max(1, counts[right].sum())
    return {
        "mean": float(tau.mean()),
        "sd": float(tau.std()),
        "off": int(tau.sum()) - (sum(pulls) - commits),
        "inverse": float(np.mean(1 / (tau + 1))),
        "geometric": float(np.abs(np.cumsum(counts) / commits - (1 - stay ** (values + 1))).max()),
        "right half": float(np.abs(of_right - (1 - stay ** (values[right] - workers + 2))).max()),
        "counts": counts[: 4 * workers].tolist(),
    }


def late(kind: str, draws: int, seed: int) -> dict[str, Any]:
    """Return the share of step times above `LATE` times the mean, in percent, and a histogram of relative times."""
    machines = 1 if kind == "homogeneous" else draws
    draw_time = TIMINGS[kind].sampler(machines, np.random.default_rng(seed))
    times = np.array([draw_time(place % machines, 1) for place in range(draws)])
    times /= times.mean() if kind == "homogeneous" else TIMINGS[kind].mean
    density, _ = np.histogram(times, bins=60, range=(0, 3), density=True)
    return {"late": 100 * float((times > LATE).mean()), "density": density.round(4).tolist()}


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of claim 1."""
    commits, draws = scale.budget(COMMITS), scale.budget(DRAWS)
    by_name: dict[str, Job] = {
        f"{kind}/{workers}/{seed}": partial(staleness, kind, workers, commits, seed)
        for kind in TIMINGS
        for workers in WORKERS
        for seed in scale.seeds
    }
    return by_name | {
        f"late/{kind}/{seed}": partial(late, kind, draws, seed) for kind in PAPER_LATE for seed in scale.seeds
    }


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 1, from its figures."""
    over = partial(_spread_of, results, scale)
    checks = [*_staleness_checks(over), *_step_time_checks(results, scale)]
    table = Table(
        "Mean staleness ± its standard deviation over the commits of a run (means over the seeds)",
        ("n", "n − 1", *TIMINGS),
        [
            (str(n), str(n - 1), *(f"{over(k, n, 'mean').mean:.2f} ± {over(k, n, 'sd').mean:.2f}" for k in TIMINGS))
            for n in WORKERS
        ],
    )
    figures = [
        Figure(
            _histograms(results, scale, folder),
            f"How often each staleness occurs with n = {SHOWN} workers (all seeds). Dashed: n − 1. Line: the "
            "geometric distribution. Staleness of 80 and more, such as that of the slow workers, is cut off.",
        ),
        Figure(_times(results, scale, folder), f"Step times over their mean; orange: more than {LATE} times the mean."),
    ]
    setting = (
        f"{scale.budget(COMMITS):,} commits of ASGD a run, seeds {listed(scale.seeds)}. Environments: "
        "gamma-distributed times, homogeneous and heterogeneous (Hakimi et al., Algorithms 11 and 12); a "
        "sixteenth of the workers, rounded up, ten times slower (Shi et al.); exponential times."
    )
    return Section(setting, checks, [table, *figures])


def _spread_of(results: Results, scale: Scale, kind: str, workers: int, key: str) -> Spread:
    return over_seeds(results, f"{kind}/{workers}", scale, key)


def _staleness_checks(over: Callable[[str, int, str], Spread]) -> list[Check]:
    cases = [(kind, workers) for kind in TIMINGS for workers in WORKERS]
    worst = max(abs(over(kind, n, "mean").mean / (n - 1) - 1) for kind, n in cases)
    off = max(abs(value) for kind, n in cases for value in over(kind, n, "off").values)
    geometric = max(over("memoryless", n, "geometric").mean for n in WORKERS)
    inverse = max(abs(over("memoryless", n, "inverse").mean / (math.log(n) / (n - 1)) - 1) for n in WORKERS)
    right = {kind: max(over(kind, n, "right half").mean for n in WORKERS) for kind in list(TIMINGS)[:2]}
    means = [f"{over(kind, SHOWN, 'mean').show()} ({kind})" for kind in TIMINGS]
    return [
        Check(
            f"mean staleness within {TOLERANCE:.0%} of n − 1, in every environment and for every n",
            "E[τ] = n − 1 (Figures 2.1, 4.2)",
            f"n = {SHOWN}: {listed(means)}; largest deviation of all n: {worst:.2%}",
            worst < TOLERANCE,
        ),
        Check(
            "the staleness of all commits adds up to the sum of the workers' last pulls less the number of commits, "
            "exactly, in every run",
            "follows from the definition, not stated",
            f"largest difference: {off:.0f}",
            off == 0,
        ),
        Check(
            f"memoryless workers: the distribution function of τ is within {GEOMETRIC} of the geometric one, and "
            "E[1/(τ+1)] within 2 % of ln n/(n − 1)",
            "“geometrically distributed” (Figure 2.1); 1/(n − 1) (Eq 2.14)",
            f"largest distance {geometric:.3f}; E[1/(τ+1)] off by at most {inverse:.2%} "
            f"(n = {SHOWN}: {over('memoryless', SHOWN, 'inverse').show(4)}, Eq 2.14: {1 / (SHOWN - 1):.4f})",
            geometric < GEOMETRIC and inverse < 0.02,
        ),
        Check(
            f"gamma-distributed times: the right half of the distribution, τ ≥ n − 1, is within {GEOMETRIC} of the "
            "geometric one",
            "the “right half of the distribution” is geometric (Figure 2.1)",
            f"largest distance: {listed([f'{value:.2f} ({kind})' for kind, value in right.items()])}",
            max(right.values()) < GEOMETRIC,
        ),
    ]


def _step_time_checks(results: Results, scale: Scale) -> list[Check]:
    checks = []
    for kind, paper in PAPER_LATE.items():
        share = over_seeds(results, f"late/{kind}", scale, "late")
        checks.append(
            Check(
                f"{kind}: share of steps that take more than {LATE} times the mean within {LATE_TOLERANCE[kind]} "
                "points of what the two gamma distributions give",
                f"{paper:g} % (Figure 3); exactly {EXACT_LATE[kind]:g} %",
                f"{share.show()} %",
                abs(share.mean - EXACT_LATE[kind]) < LATE_TOLERANCE[kind],
            )
        )
    return checks


def _histograms(results: Results, scale: Scale, folder: Path) -> str:
    figure, axes = draw.panels(2, 2, 2.7, sharex=True)
    places = np.arange(4 * SHOWN)
    for number, (kind, ax) in enumerate(zip(TIMINGS, axes.flat, strict=True)):
        counts = np.zeros(len(places))
        for seed in scale.seeds:
            own = results[f"{kind}/{SHOWN}/{seed}"]["counts"]
            counts[: len(own)] += own
        commits = scale.budget(COMMITS) * len(scale.seeds)
        ax.bar(places, 100 * counts / commits, width=1, color=draw.COLORS[number], alpha=0.8)
        ax.plot(places, 100 / SHOWN * (1 - 1 / SHOWN) ** places, color="black", linewidth=1.2, label="geometric")
        ax.axvline(SHOWN - 1, color="black", linestyle="--", linewidth=1, label="n − 1")
        draw.finish(ax, "staleness τ (commits)", "share of commits (%)", kind, legend=number == 0)
    return draw.save(figure, folder, "staleness-distribution.png")


def _times(results: Results, scale: Scale, folder: Path) -> str:
    figure, axes = draw.panels(2, 1, 2.6)
    edges = np.linspace(0, 3, 61)
    for kind, ax in zip(PAPER_LATE, axes.flat, strict=True):
        density = np.mean([results[f"late/{kind}/{seed}"]["density"] for seed in scale.seeds], axis=0)
        colors = [draw.COLORS[1] if edge > LATE - 1e-9 else draw.COLORS[0] for edge in edges[:-1]]
        ax.bar(edges[:-1], density, width=edges[1], align="edge", color=colors)
        share = over_seeds(results, f"late/{kind}", scale, "late")
        draw.finish(ax, "step time / mean", "density", f"{kind}: {share.mean:.2f} % orange", legend=False)
    return draw.save(figure, folder, "step-times.png")


CLAIM = Claim(
    name="staleness",
    title="Mean staleness is n − 1",
    says="For any speeds of the workers, the mean staleness is one less than their number; it is geometrically "
    "distributed. Step times of equal machines rarely exceed their mean by a quarter, those of mixed machines often.",
    source="Hermans 2017, Section 2.1, Figures 2.1, 4.2, 4.5, Eq 2.14; Hakimi et al. 2019, Appendix A.4, Figure 3",
    first=Criteria(jobs, section),
)
