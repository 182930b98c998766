"""Claims 4 and 5: elastic averaging, its equilibrium and its early stopping; temporal efficiency of AGN against it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.analysis import metrics
from distkeras.ps import rules
from distkeras.ps.simulation.simulate import simulate
from reproduction import beale
from reproduction.claims import Claim, Criteria, Job, Results, Scale, over_seeds
from reproduction.parts import Check, Section, Table
from reproduction.runs import Run, best_rate, history, simulated, train
from reproduction.spreads import Spread, listed

#: Figure 2.7's hyper-parameters.
WORKERS, WINDOW, RHO, RATE = 5, 30, 5.0, 1e-5
STOPS = (None, "2.9", "2.10")
BEALE_BUDGET, BEALE_START, BEALE_NOISE = 100_000, (-2.0, -2.5), 1.0
RARELY = 0.05
AEASGD_WINDOWS, AEASGD_WORKERS, AEASGD_RATE, BUDGET = (1, 10, 30), 10, 0.05, 6000


def equilibrium(seed: int) -> dict[str, Any]:
    """Run synchronous EASGD on a plane: the distance before an exchange, against lambda ||g|| / ((n + 1) rho)."""
    slope, eta, evaluated = np.random.default_rng(seed).normal(size=8), 1e-3, []

    def gradient(theta: np.ndarray, worker: int) -> np.ndarray:
        evaluated.append(theta.copy())
        return slope

    trace = simulate(
        rules.make("easgd", window=WINDOW, rho=RHO),
        np.zeros(8),
        gradient,
        workers=WORKERS,
        learning_rate=eta,
        schedule=list(range(WORKERS)) * 1500,
        keep_centers=True,
    )
    assert trace.centers is not None
    center = trace.centers[-WORKERS - 1]  # These are the parameters as pulled before the last round.
    distance = float(np.linalg.norm(evaluated[-1] - eta * slope - center))
    return {"relative": distance / (WINDOW * float(np.linalg.norm(slope)) / ((WORKERS + 1) * RHO))}


def on_beale(stop: str | None, budget: int, seed: int, window: int = WINDOW) -> dict[str, Any]:
    """Run EASGD on Beale's function with a budget of gradients over all workers."""
    rule = rules.make("easgd", window=window, rho=RHO, early_stopping=stop)
    rounds = max(1, budget // (WORKERS * window))
    while True:  # Windows that end early need more rounds for as many gradients.
        trace = simulate(
            rule,
            np.array(BEALE_START),
            beale.noisy(BEALE_NOISE, seed),
            workers=WORKERS,
            learning_rate=RATE,
            schedule=list(range(WORKERS)) * rounds,
            keep_centers=True,
        )
        spent = np.cumsum(trace.steps)
        if spent[-1] >= budget * 0.99:
            break
        rounds = max(rounds + 1, math.ceil(1.1 * rounds * budget / spent[-1]))
    assert trace.centers is not None
    used = int(np.searchsorted(spent, budget, side="right"))
    centers = trace.centers[:used]
    places = np.unique(np.linspace(0, used - 1, 60).astype(int))
    return {
        "value": float(beale.value(*centers[-1])),
        "early": float((trace.steps[:used] < window).mean()),
        "commits": used,
        "curve": [spent[places].tolist(), [float(f"{beale.value(*centers[place]):.4g}") for place in places]],
    }


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of claim 4."""
    gradients = scale.budget(BUDGET, 30)
    by_name: dict[str, Job] = {f"equilibrium/{seed}": partial(equilibrium, seed) for seed in scale.seeds}
    for seed in scale.seeds:
        for stop in STOPS:
            by_name[f"beale/{stop}/{seed}"] = partial(
                on_beale, stop, scale.budget(BEALE_BUDGET, WORKERS * WINDOW), seed
            )
        for window in AEASGD_WINDOWS:
            run = Run("aeasgd", AEASGD_WORKERS, AEASGD_RATE, gradients, options=(("window", window), ("rho", RHO)))
            by_name[f"aeasgd/{window}/{seed}"] = partial(train, run, seed)
    return by_name


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 4, from its figures."""
    of = partial(over_seeds, results, scale=scale)
    relative = of("equilibrium", key="relative")
    value = {stop: of(f"beale/{stop}", key="value") for stop in STOPS}
    early = {stop: of(f"beale/{stop}", key="early") for stop in STOPS}
    commits = {stop: of(f"beale/{stop}", key="commits") for stop in STOPS}
    accuracy = {window: of(f"aeasgd/{window}", key="accuracy") for window in AEASGD_WINDOWS}
    short, *_, long = AEASGD_WINDOWS
    closer = [b < a for a, b in zip(value[None].values, value["2.10"].values, strict=True)]
    checks = [
        Check(
            "synchronous EASGD, constant gradient: the distance before an exchange settles at λ‖g‖/((n + 1)ρ), to "
            "one part in a million",
            "an equilibrium exists (Eq 2.7); this value is derived, not stated",
            f"distance over that value: {relative.show(9)}",
            max(abs(one - 1) for one in relative.values) < 1e-6,
        ),
        Check(
            "Beale's function: stopping early by Eq 2.10 brings the center lower than the full window does, on as many "
            "gradients, with every seed",
            "“benefits the central variable in terms of convergence” (Figure 2.9)",
            f"f = {value['2.10'].show(3)} with Eq 2.10, {value[None].show(3)} without",
            all(closer),
        ),
        Check(
            f"Eq 2.9 ends fewer than {RARELY:.0%} of the windows, Eq 2.10 more than Eq 2.9",
            "Eq 2.9 is “rarely satisfied” (Section 2.2.2)",
            f"Eq 2.9 ended {early['2.9'].percent} % of the windows, Eq 2.10 {early['2.10'].percent} %",
            early["2.9"].mean < RARELY and early["2.10"].mean > early["2.9"].mean,
        ),
        Check(
            f"AEASGD on Fashion-MNIST: λ = {long} ends above λ = {short} by more than the larger standard deviation",
            "“in general, the central variable benefits from more exploration” (Figure 2.16)",
            listed([f"λ = {window}: {accuracy[window].percent} %" for window in AEASGD_WINDOWS]),
            accuracy[long].mean - accuracy[short].mean > max(accuracy[long].sd, accuracy[short].sd),
        ),
    ]
    names = {None: "full window", "2.9": "Eq 2.9", "2.10": "Eq 2.10"}
    table = Table(
        "EASGD on Beale's function",
        ("early stopping", "f(center) at the end", "windows ended early (%)", "exchanges"),
        [(names[stop], value[stop].show(3), early[stop].percent, commits[stop].show(0)) for stop in STOPS],
    )
    setting = (
        f"Figure 2.7's hyper-parameters: n = {WORKERS}, λ = {WINDOW}, ρ = {RHO:g}, η = {RATE:g}; start {BEALE_START} "
        f"(the thesis does not give its own), gradients with noise of standard deviation {BEALE_NOISE:g}, "
        f"{scale.budget(BEALE_BUDGET, WORKERS * WINDOW):,} gradients over all workers. AEASGD: n = {AEASGD_WORKERS}, "
        f"η = {AEASGD_RATE}, {scale.budget(BUDGET, 30):,} mini-batches. Seeds {listed(scale.seeds)}."
    )
    return Section(setting, checks, [table])


ELASTIC = Claim(
    name="elastic",
    title="Elastic averaging reaches an equilibrium, which early stopping uses",
    says="A worker tied to the center by a spring stops where the gradient equals the spring's force, and what it "
    "computes there is wasted; exchanging early when it comes near (Eq 2.10) brings the center forward, whereas the "
    "exact condition (Eq 2.9) is rarely met. Asynchronously, longer windows help.",
    source="Hermans 2017, Section 2.2.2, Eq 2.7, 2.9, 2.10, Figures 2.7-2.11; Section 2.3.3, Figure 2.16",
    first=Criteria(jobs, section),
)

#: The configurations of table 3.1 that are run here.
TABLE = {
    (10, 10): 1.009,
    (10, 20): 1.003,
    (10, 40): 0.990,
    (20, 10): 0.983,
    (20, 20): 1.022,
    (20, 40): 0.997,
    (40, 10): 1.044,
    (40, 20): 1.027,
    (40, 40): 1.009,
}
PAPER_SHARE, AHEAD = 69.73, 0.5
GRIDS = {"agn": (0.05, 0.1, 0.2, 0.4), "aeasgd": (0.02, 0.05, 0.1, 0.19)}
TUNED_ON = (20, 20)


def configured(rule: str, workers: int, window: int, gradients: int, rate: float = 0.0) -> Run:
    """Return a run of claim 5."""
    options = (("window", window), ("rho", RHO)) if rule == "aeasgd" else (("window", window),)
    return Run(rule, workers, rate, gradients, options=options)


def efficiency(cases: list[tuple[int, int]], gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the temporal efficiency of AGN over AEASGD in virtual time, from the workers' training accuracy."""
    rates = {rule: best_rate(configured(rule, *TUNED_ON, gradients), grid) for rule, grid in GRIDS.items()}
    found: dict[str, Any] = {"rates": rates}
    for workers, window in cases:
        runs = {rule: configured(rule, workers, window, gradients, rate) for rule, rate in rates.items()}
        histories = [{rule: history(*simulated(run, seed)) for rule, run in runs.items()} for seed in seeds]
        found[f"{workers}/{window}"] = [metrics.temporal_efficiency(one["agn"], one["aeasgd"]) for one in histories]
    return found


def efficiency_jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of claim 5."""
    halves = [list(TABLE)[0::2], list(TABLE)[1::2]]
    gradients = scale.budget(BUDGET, 40 * 3)
    return {f"half/{place}": partial(efficiency, half, gradients, scale.seeds) for place, half in enumerate(halves)}


def efficiency_section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 5, from its figures."""
    ratios = {
        case: Spread.of(
            next(half[f"{case[0]}/{case[1]}"] for half in results.values() if f"{case[0]}/{case[1]}" in half)
        )
        for case in TABLE
    }
    rates = results["half/0"]["rates"]
    ahead = [case for case, ratio in ratios.items() if ratio.mean > 1]
    paper_ahead = [case for case, ratio in TABLE.items() if ratio > 1]
    by_workers = {n: float(np.mean([ratios[case].mean for case in TABLE if case[0] == n])) for n in (10, 20, 40)}
    checks = [
        Check(
            f"temporal efficiency of AGN over AEASGD (mean over seeds) above 1 in more than {AHEAD:.0%} of "
            "the settings",
            f"in {PAPER_SHARE} % of 49 settings (Table 3.1; {len(paper_ahead)} of the {len(TABLE)} that are run here)",
            f"in {len(ahead)} of {len(TABLE)}",
            len(ahead) > AHEAD * len(TABLE),
        ),
        Check(
            "AGN's advantage is larger with 40 workers than with 10 (means over the windows)",
            f"{np.mean([TABLE[case] for case in TABLE if case[0] == 40]):.3f} against "
            f"{np.mean([TABLE[case] for case in TABLE if case[0] == 10]):.3f} (Table 3.1, same settings)",
            f"{by_workers[40]:.3f} against {by_workers[10]:.3f}",
            by_workers[40] > by_workers[10],
        ),
    ]
    table = Table(
        "Temporal efficiency of AGN over AEASGD; above 1, AGN is ahead",
        ("n", "λ", "Table 3.1", "here"),
        [(str(n), str(w), f"{TABLE[n, w]:.3f}", ratios[n, w].show(3)) for n, w in TABLE],
    )
    setting = (
        f"{scale.budget(BUDGET, 120):,} mini-batches a run, homogeneous gamma-distributed times, "
        f"`distkeras.analysis.metrics.temporal_efficiency` of the workers' training accuracy in virtual time. "
        f"Learning rates chosen once at n = {TUNED_ON[0]}, λ = {TUNED_ON[1]} with seed 0: AGN {rates['agn']:g} of "
        f"{listed(GRIDS['agn'])}, AEASGD (ρ = {RHO:g}) {rates['aeasgd']:g} of {listed(GRIDS['aeasgd'])}. "
        f"Seeds {listed(scale.seeds)}."
    )
    return Section(setting, checks, [table])


EFFICIENCY = Claim(
    name="efficiency",
    title="AGN is temporally more efficient than AEASGD",
    says="Over the time of training, the area under AGN's accuracy is larger than that under AEASGD's in most settings "
    "of workers and windows.",
    source="Hermans 2017, Section 3.4, Eq 3.4, Table 3.1",
    first=Criteria(efficiency_jobs, efficiency_section),
)
