"""DOWNPOUR, accumulated gradients with and without normalization, and ADAG."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from reproduction import draw
from reproduction.claims import Check, Claim, Count, Figure, Job, Results, Scale, Section, Table
from reproduction.runs import Run, train
from reproduction.spreads import SeedRuns, Spread, listed, points

WORKERS, WINDOWS = (10, 20, 40), (1, 10, 30)
FEW, MANY, HIGHEST = WORKERS
BUDGET = 6000
#: Learning rates, descending by a factor of about the square root of 2.
RATES = (0.4, 0.28, 0.2, 0.14, 0.1, 0.07, 0.05, 0.035, 0.025)
CONVERGED, LOSS_OF_POINTS = 0.75, 5.0
NAMES = {"downpour": "DOWNPOUR", "agn": "AGN", "adag": "ADAG"}


def run(rule: str, workers: int, window: int, gradients: int, rate: float = 0.0) -> Run:
    """Return a run of ``workers`` workers under ``rule`` with windows of ``window``."""
    return Run(rule, workers, rate, gradients, options=(("window", window),))


@cache
def limit(gradients: int) -> float:
    """Return the largest rate at which DOWNPOUR with few workers converges: all rules of the claim run with it."""
    for rate in RATES[:-1]:
        if train(run("downpour", FEW, 1, gradients, rate), 0, "held out")["accuracy"] >= CONVERGED:
            return rate
    return RATES[-1]


def at_limit(rule: str, workers: int, window: int, gradients: int, seed: int) -> dict[str, Any]:
    """Return the figures of a run at the rate of `limit`."""
    rate = limit(gradients)
    return {"rate": rate, **train(run(rule, workers, window, gradients, rate), seed)}


def _name(rule: str, workers: int, window: int) -> str:
    return f"{'downpour' if (rule, window) == ('agn', 1) else rule}/{workers}/{window}"


def _jobs(scale: Scale) -> dict[str, Job]:
    gradients = scale.budget(BUDGET, 30)
    return {
        f"{_name(rule, workers, window)}/{seed}": partial(at_limit, rule, workers, window, gradients, seed)
        for rule in NAMES
        for workers in WORKERS
        for window in WINDOWS
        if (rule, window) != ("agn", 1)  # that is DOWNPOUR
        for seed in scale.seeds(1, 3)
    }


class _WindowFigures(SeedRuns):
    """Spreads of the runs by (rule, workers, window)."""

    def __call__(self, *case: Any) -> Spread:
        return self.spread(_name(*case))

    def diverged(self, *case: Any) -> int:
        """Return the number of runs that have diverged."""
        return sum(one["diverged"] for one in self.runs[_name(*case)])

    def show(self, *case: Any) -> str:
        """Return the accuracy, as text for a table."""
        lost = self.diverged(*case)
        return self(*case).percent + (f" ({lost} diverged)" if lost else "")

    def curves(self, *case: Any) -> list[Any]:
        """Return the accuracy over time, for each seed."""
        return [one["curve"] for one in self.runs[_name(*case)]]

    @property
    def rate(self) -> float:
        """Return the learning rate of all runs."""
        return float(self.runs[_name("downpour", FEW, 1)][0]["rate"])


def _setting(of: _WindowFigures, scale: Scale) -> str:
    seeds = listed(scale.seeds(1, 3))
    return (
        f"{scale.budget(BUDGET, 30):,} mini-batches a run, shared by the workers; homogeneous gamma-distributed times; "
        f"no decay, the same learning rate for all rules, as in the thesis: {of.rate:g}, the largest of "
        f"{listed(RATES)} at which DOWNPOUR with n = {FEW} and λ = 1 is right on {CONVERGED:.0%} of the held-out rows "
        f"(seed 0). Test accuracy of the center in %, mean ± standard deviation over seeds {seeds}; a "
        "run has diverged if its test loss ends above that of guessing."
    )


def _section(results: Results, scale: Scale, folder: Path) -> Section:
    of = _WindowFigures(results)
    table = Table(
        "Test accuracy (%)",
        ("n", "λ", "DOWNPOUR", "AGN", "ADAG on AGN", "ADAG's mean scale factor"),
        [
            (str(n), str(w), *(of.show(rule, n, w) for rule in NAMES), of.spread(f"adag/{n}/{w}", "scale").show(2))
            for n in WORKERS
            for w in WINDOWS
        ],
    )
    caption = (
        "Training accuracy with windows of 10, mean over the seeds. Less time passes with more workers, who share the "
        "same mini-batches."
    )
    checks = [*_window_checks(of), _adag_check(of)]
    return Section(_setting(of, scale), checks, [table, Figure(_curves(of, folder), caption)])


def _window_checks(of: _WindowFigures) -> list[Check]:
    long = WINDOWS[1:]
    base, crowd, accumulated = ("downpour", FEW, 1), ("downpour", MANY, 1), ("downpour", FEW, 10)
    pairs = [(n, window) for n in WORKERS for window in long]
    beaten = [pair for pair in pairs if of("agn", *pair).mean > of("downpour", *pair).mean]
    lost = sum(of.diverged("agn", *pair) for pair in pairs)
    falls = {w: points(of("agn", FEW, w), of("agn", HIGHEST, w)) for w in long}
    return [
        Check(
            f"DOWNPOUR: n = {MANY} ends at least {LOSS_OF_POINTS:g} points below n = {FEW}",
            "n = 10 converges, n = 20 diverges (Figure 2.13)",
            f"{of.show(*base)} at n = {FEW}, {of.show(*crowd)} at n = {MANY}",
            points(of(*base), of(*crowd)) >= LOSS_OF_POINTS,
        ),
        Check(
            f"DOWNPOUR with n = {FEW}: λ = 10 ends at least {LOSS_OF_POINTS:g} points below λ = 1",
            "no longer converges “as before” (Figure 3.2)",
            f"{of.show(*base)} at λ = 1, {of.show(*accumulated)} at λ = 10",
            points(of(*base), of(*accumulated)) >= LOSS_OF_POINTS,
        ),
        Check(
            f"AGN with λ of {listed(long)} never diverges, and is above accumulated DOWNPOUR for every n",
            "AGN “was able to stabilize in all situations” (Chapter 6)",
            f"{lost} of {len(pairs) * len(of.curves(*base))} runs diverged; above DOWNPOUR in {len(beaten)} of "
            f"{len(pairs)} settings",
            lost == 0 and len(beaten) == len(pairs),
        ),
        Check(
            f"AGN loses more from n = {FEW} to n = {HIGHEST} at λ = 10 than at λ = 30",
            "validation accuracy 98.43 → 95.55 % at λ = 10, 98.50 → 98.45 % at λ = 30 (Table 3.2)",
            f"{falls[10]:.1f} points at λ = 10, {falls[30]:.1f} at λ = 30",
            falls[10] > falls[30],
        ),
    ]


def _adag_check(of: _WindowFigures) -> Check:
    agn, adag = (of(rule, HIGHEST, 10) for rule in ("agn", "adag"))
    early = {rule: Spread.of([_early(curve) for curve in of.curves(rule, HIGHEST, 10)]) for rule in ("agn", "adag")}
    return Check(
        f"ADAG on top of AGN (γ = 1e-4) with n = {HIGHEST}, λ = 10: training accuracy over the first half of the "
        "run above AGN's by more than the larger standard deviation",
        "the divergent start of AGN is absent (Figure 4.4; n = 30)",
        f"AGN {early['agn'].percent}, ADAG {early['adag'].percent}; at the end, on the test rows, {agn.percent} "
        f"and {adag.percent}",
        early["adag"].mean - early["agn"].mean > max(early["agn"].sd, early["adag"].sd),
    )


def _curves(of: _WindowFigures, folder: Path) -> str:
    figure, axes = draw.panels(3, 1, 3.0, sharey=True)
    for ax, n in zip(axes.flat, WORKERS, strict=True):
        for place, (rule, title) in enumerate(NAMES.items()):
            draw.curve(ax, of.curves(rule, n, 10), place, title)
        draw.finish(ax, "time (mean step times)", "training accuracy (%)", f"n = {n}, λ = 10", legend=n == FEW)
        ax.label_outer()
    return draw.save(figure, folder, "windows.png")


def _early(curve: Any) -> float:
    values = curve[1][: max(1, len(curve[1]) // 2)]
    return float(sum(values) / len(values))


CLAIM = Claim(
    name="windows",
    title="DOWNPOUR fails with more workers and longer windows; AGN and ADAG do not",
    says="DOWNPOUR diverges when workers are added, and sooner when gradients are accumulated. Dividing by the window "
    "(AGN) cures that, and scaling by the distance that the center has moved (ADAG) cures what remains with many "
    "workers and frequent commits.",
    source="Hermans 2017, Chapters 3 and 4, Figures 1.5, 2.13, 3.2, 4.1, 4.4, Table 3.2",
    jobs=_jobs,
    section=_section,
    before=Count(1, 1),
)
