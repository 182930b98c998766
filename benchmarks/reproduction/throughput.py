"""Claim 9: asynchronous against synchronous time."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.ps.simulation.simulate import simulate
from reproduction import draw
from reproduction.claims import Claim, Criteria, Job, Results, Scale
from reproduction.parts import Check, Figure, Section, Table
from reproduction.runs import TIMINGS, Run, time_to, tuned
from reproduction.spreads import Spread, chosen, listed

WORKERS = (1, 4, 8, 16, 32, 64)
#: The number of clusters whose throughput is averaged: one draw of the machines' speeds is not representative.
CLUSTERS = 10
HOMOGENEOUS, HETEROGENEOUS, LINEAR = (1.10, 1.30), (4.0, 8.0), 0.02
BUDGET, RATES, TARGET, AT = 3000, (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005), 0.75, 16
KINDS = ("homogeneous", "heterogeneous")
#: The key of each environment's run in the results.
ENVIRONMENTS = {"homogeneous": "run", "slow workers": "slow workers"}


def throughput(rule: str, kind: str, n: int, rounds: int, seed: int) -> float:
    """Return the gradients per mean step time."""
    zero = np.zeros(1)
    steps = rounds * n
    trace = simulate(
        rule,
        zero,
        lambda theta, worker: zero,
        workers=n,
        learning_rate=1.0,
        timing=TIMINGS[kind],
        steps=steps,
        seed=seed,
    )
    return steps / float(trace.time[-1]) * 128


def throughputs(kind: str, n: int, rounds: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the throughput of both kinds, by seed."""
    return {rule: [throughput(rule, kind, n, rounds, seed) for seed in seeds] for rule in ("asgd", "ssgd")}


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of claim 9."""
    seeds = tuple(range(1, CLUSTERS + 1))
    by_name: dict[str, Job] = {
        f"{kind}/{n}": partial(throughputs, kind, n, scale.budget(100), seeds) for kind in KINDS for n in WORKERS
    }
    for rule in ("ormo", "ssgdm"):
        variants = {kind: Run(rule, AT, 0.0, scale.budget(BUDGET), kind, decay=False) for kind in ("slow workers",)}
        run = Run(rule, AT, 0.0, scale.budget(BUDGET))
        by_name[f"training/{rule}"] = partial(tuned, run, RATES, scale.seeds, **variants)  # SSGDm adds gradients up
    return by_name


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 9, from its figures."""
    rates = {rule: chosen(results[f"training/{rule}"]["rate"], RATES) for rule in ("ormo", "ssgdm")}
    setting = (
        f"Throughput in virtual time without any cost of communication, as in the paper; {CLUSTERS} draws of the "
        f"cluster, {scale.budget(100)} gradients a worker. OrMo and SSGDm (K = {AT}): {scale.budget(BUDGET):,} "
        f"mini-batches, constant rates chosen with seed 0 of {listed(RATES)}: OrMo {rates['ormo']}, SSGDm "
        f"{rates['ssgdm']} (for the sum of a round's gradients); seeds {listed(scale.seeds)}. "
        "With 8 GPUs and real communication, the paper measures "
        "6.78x against 5.40x speedup (Table 1: batch 256), which is not modeled."
    )
    caption = "Left and middle: throughput. Right: the same number of gradients under OrMo and under SSGDm."
    return Section(
        setting,
        [*_throughput_checks(results), *_time_checks(results)],
        [_table(results), Figure(_picture(results, folder), caption)],
    )


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


def _time_checks(results: Results) -> list[Check]:
    times = {
        (rule, kind): Spread.of([time_to(run["curve"], TARGET) / 128 for run in results[f"training/{rule}"][key]])
        for rule in ("ormo", "ssgdm")
        for kind, key in ENVIRONMENTS.items()
    }
    ends = {
        (rule, kind): Spread.of([run["time"] / 128 for run in results[f"training/{rule}"][key]])
        for rule in ("ormo", "ssgdm")
        for kind, key in ENVIRONMENTS.items()
    }
    gain = {kind: ends["ssgdm", kind].mean / ends["ormo", kind].mean for kind in ENVIRONMENTS}
    return [
        Check(
            f"K = {AT}: OrMo's training accuracy is at {TARGET:.0%} before SSGDm's, with slow workers and "
            "without (means)",
            "“significant advantages in training speed” (Figure 5)",
            "; ".join(
                f"{kind}: {_time(times['ormo', kind])} against {_time(times['ssgdm', kind])}" for kind in ENVIRONMENTS
            )
            + " mean step times",
            all(times["ormo", kind].mean < times["ssgdm", kind].mean for kind in ENVIRONMENTS),
        ),
        Check(
            "OrMo's advantage in time for the same number of gradients is larger with slow workers",
            "SSGDm “is further slowed down” (Figure 5)",
            f"{gain['homogeneous']:.2f} times, with slow workers {gain['slow workers']:.2f} times",
            gain["slow workers"] > gain["homogeneous"],
        ),
    ]


def _table(results: Results) -> Table:
    return Table(
        f"Gradients per mean step time (mean ± standard deviation over {CLUSTERS} clusters), and the ratio",
        ("N", *(f"{kind}: {what}" for kind in KINDS for what in ("asynchronous", "synchronous", "ratio"))),
        [
            (
                str(n),
                *(
                    text
                    for kind in KINDS
                    for text in (
                        Spread.of(results[f"{kind}/{n}"]["asgd"]).show(1),
                        Spread.of(results[f"{kind}/{n}"]["ssgd"]).show(1),
                        _ratio(results, kind, n).show(),
                    )
                ),
            )
            for n in WORKERS
        ],
    )


def _picture(results: Results, folder: Path) -> str:
    figure, axes = draw.panels(3, 1, 3.1)
    for ax, kind in zip(axes.flat, KINDS, strict=False):
        for place, (rule, title) in enumerate({"asgd": "asynchronous", "ssgd": "synchronous"}.items()):
            draw.spreads(ax, WORKERS, [Spread.of(results[f"{kind}/{n}"][rule]) for n in WORKERS], place, title)
        draw.finish(ax, "workers N", "gradients per mean step time", kind)
    last = axes[0, 2]
    for place, (rule, kind) in enumerate(product(("ormo", "ssgdm"), ENVIRONMENTS)):
        curves = [run["curve"] for run in results[f"training/{rule}"][ENVIRONMENTS[kind]]]
        draw.curve(last, curves, place, f"{'OrMo' if rule == 'ormo' else 'SSGDm'}, {kind}")
    last.set_xscale("log")
    draw.finish(last, "time (mean step times)", "training accuracy (%)", f"K = {AT}")
    last.legend(frameon=False, fontsize=7)
    return draw.save(figure, folder, "throughput.png")


def _time(spread: Spread) -> str:
    return spread.show(0) if math.isfinite(spread.mean) else "not reached with every seed"


CLAIM = Claim(
    name="throughput",
    title="Asynchronous training is faster, most of all on mixed machines",
    says="Asynchronous workers speed up linearly; a barrier costs a fifth with equal machines, and most of the time "
    "with mixed ones.",
    source="Hakimi et al. 2019, Appendix C, Figure 12, Table 1; Shi et al. 2024, Figure 5",
    first=Criteria(jobs, section),
)
