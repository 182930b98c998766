"""Asynchronous against synchronous time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.ps.simulation.simulate import simulate
from reproduction import draw
from reproduction.claims import Check, Claim, Count, Figure, Job, Results, Scale, Section, Table, revised
from reproduction.runs import TIMINGS, Run, best, reached, scores, train
from reproduction.spreads import Spread, chosen, listed

WORKERS = (1, 4, 8, 16, 32, 64)
#: The number of clusters whose throughput is averaged: one draw of the machines' speeds is not representative.
CLUSTERS = 10
HOMOGENEOUS, HETEROGENEOUS, LINEAR = (1.10, 1.30), (4.0, 8.0), 0.02
BUDGET, RATES, TARGET, AT, SEEDS = 3000, (0.01, 0.005, 0.002), 0.75, 16, (11, 10)
KINDS = ("homogeneous", "heterogeneous")
NAMES = {"ormo": "OrMo", "ssgdm": "SSGDm"}
ENVIRONMENTS = ("homogeneous", "slow workers")


def throughput(rule: str, kind: str, n: int, rounds: int, seed: int) -> float:
    """Return the gradients per mean step time."""
    zero, steps = np.zeros(1), rounds * n
    options: dict[str, Any] = {"workers": n, "learning_rate": 1.0, "timing": TIMINGS[kind]}
    trace = simulate(rule, zero, lambda theta, worker: zero, steps=steps, seed=seed, **options)
    return steps / float(trace.time[-1]) * 128


def throughputs(kind: str, n: int, rounds: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the throughput of both kinds, by seed."""
    return {rule: [throughput(rule, kind, n, rounds, seed) for seed in seeds] for rule in ("asgd", "ssgd")}


def measured(rule: str, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the time to the training accuracy `TARGET`, in mean step times, by environment and seed."""
    run = Run(rule, AT, 0.0, gradients)
    run = replace(run, rate=best(scores(run, RATES)))
    return {"rate": run.rate} | {
        kind: [reached(train(replace(run, timing=kind), seed)["curve"], TARGET) / 128 for seed in seeds]
        for kind in ENVIRONMENTS
    }


def _jobs(scale: Scale) -> dict[str, Job]:
    seeds = tuple(range(1, CLUSTERS + 1))
    rates = {f"{kind}/{n}": partial(throughputs, kind, n, scale.budget(100), seeds) for kind in KINDS for n in WORKERS}
    return rates | {rule: partial(measured, rule, scale.budget(BUDGET), scale.seeds(*SEEDS)) for rule in NAMES}


def _section(results: Results, scale: Scale, folder: Path) -> Section:
    seeds = scale.seeds(*SEEDS)
    setting = (
        f"Throughput in virtual time without any cost of communication, as in the paper; {CLUSTERS} draws of the "
        f"cluster, {scale.budget(100)} gradients a worker. OrMo and SSGDm (K = {AT}): {scale.budget(BUDGET):,} "
        f"mini-batches, constant rates of {listed(RATES)} (SSGDm's for the sum of a round's gradients), chosen with "
        f"seed 0; the time is read on the line between two points of the curve; seeds {seeds[0]} to {seeds[-1]}. "
        "With 8 GPUs and real communication, the paper measures "
        "6.78x against 5.40x speedup (Table 1: batch 256), which is not modeled."
    )
    times = {(rule, kind): Spread.of(results[rule][kind]) for rule in NAMES for kind in ENVIRONMENTS}
    tables = [_table(results), _times_table(results, times)]
    checks = [*_throughput_checks(results), *_time_checks(times)]
    return Section(setting, checks, [*tables, Figure(_picture(results, folder), "Throughput.")])


def _ratio(results: Results, kind: str, n: int) -> Spread:
    """Return the asynchronous over the synchronous throughput."""
    return Spread.of(np.divide(results[f"{kind}/{n}"]["asgd"], results[f"{kind}/{n}"]["ssgd"]))


def _throughput_checks(results: Results) -> list[Check]:
    most = WORKERS[-1]
    ratio = {kind: _ratio(results, kind, most) for kind in KINDS}
    one = np.array(results["homogeneous/1"]["asgd"])
    linear = {n: Spread.of(np.array(results[f"homogeneous/{n}"]["asgd"]) / one / n) for n in WORKERS}
    worst = max(abs(linear[n].mean - 1) for n in WORKERS)
    return [
        Check(
            f"homogeneous: asynchronous throughput is within {LINEAR:.0%} of N times a single worker's, for every N",
            "“linear speedup” (Figure 12(a))",
            f"largest deviation {worst:.2%}",
            worst <= LINEAR,
        ),
        Check(
            f"homogeneous, N = {most}: asynchronous is {HOMOGENEOUS[0]:g} to {HOMOGENEOUS[1]:g} times as fast as "
            "synchronous",
            "“up to 21 % faster” (Figure 12(b); the text does not give N)",
            f"{ratio['homogeneous'].show()} times",
            HOMOGENEOUS[0] <= ratio["homogeneous"].mean <= HOMOGENEOUS[1],
        ),
        Check(
            f"heterogeneous, N = {most}: {HETEROGENEOUS[0]:g} to {HETEROGENEOUS[1]:g} times",
            "“can be 6x faster” (Figure 12(b))",
            f"{ratio['heterogeneous'].show()} times",
            HETEROGENEOUS[0] <= ratio["heterogeneous"].mean <= HETEROGENEOUS[1],
        ),
    ]


def _time_checks(times: dict[tuple[str, str], Spread]) -> list[Check]:
    saved = {kind: times["ssgdm", kind] - times["ormo", kind] for kind in ENVIRONMENTS}
    return [
        revised(
            f"K = {AT}, {kind}: OrMo's training accuracy is at {TARGET:.0%} before SSGDm's",
            "“significant advantages in training speed” (Figure 5)",
            f"{saved[kind].interval(1, 1)} mean step times earlier",
            saved[kind].above(0),
        )
        for kind in ENVIRONMENTS
    ]


def _times_table(results: Results, times: dict[tuple[str, str], Spread]) -> Table:
    return Table(
        f"Mean step times until the training accuracy is at {TARGET:.0%}",
        ("rule", "rate", *ENVIRONMENTS),
        [
            (title, chosen(results[rule]["rate"], RATES), *(times[rule, kind].show(1) for kind in ENVIRONMENTS))
            for rule, title in NAMES.items()
        ],
    )


def _row(results: Results, kind: str, n: int) -> tuple[str, ...]:
    rates = (Spread.of(results[f"{kind}/{n}"][rule]).show(1) for rule in ("asgd", "ssgd"))
    return *rates, _ratio(results, kind, n).show()


def _table(results: Results) -> Table:
    return Table(
        f"Gradients per mean step time (mean ± standard deviation over {CLUSTERS} clusters), and the ratio",
        ("N", *(f"{kind}: {what}" for kind in KINDS for what in ("asynchronous", "synchronous", "ratio"))),
        [(str(n), *(text for kind in KINDS for text in _row(results, kind, n))) for n in WORKERS],
    )


def _picture(results: Results, folder: Path) -> str:
    figure, axes = draw.panels(2, 1, 3.1)
    for ax, kind in zip(axes.flat, KINDS, strict=True):
        for place, (rule, title) in enumerate({"asgd": "asynchronous", "ssgd": "synchronous"}.items()):
            draw.spreads(ax, WORKERS, [Spread.of(results[f"{kind}/{n}"][rule]) for n in WORKERS], place, title)
        draw.finish(ax, "workers N", "gradients per mean step time", kind)
    return draw.save(figure, folder, "throughput.png")


CLAIM = Claim(
    name="throughput",
    title="Asynchronous training is faster, most of all on mixed machines",
    says="Asynchronous workers speed up linearly; a barrier costs a fifth with equal machines, and most of the time "
    "with mixed ones.",
    source="Hakimi et al. 2019, Appendix C, Figure 12, Table 1; Shi et al. 2024, Figure 5",
    jobs=_jobs,
    section=_section,
    before=Count(1, 2),
)
