"""Staleness with up to 64 workers of mixed speeds, at each number's own rates and at those of few workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from reproduction import draw
from reproduction.claims import Check, Claim, Figure, Job, Results, Scale, Section, Table
from reproduction.runs import SEARCH, Run, accuracy, at_rate, cell, searched
from reproduction.spreads import Spread, all_above, all_below, intervals, listed

WORKERS, BUDGET, TIMING = (4, 16, 64), 6000, "heterogeneous"
FEW, SOME, MANY = WORKERS
#: The first seed, and their number: five, since there are 45 settings.
SEEDS = 1, 5
#: Points that a rule may lose with many workers at the rate of few workers.
KEEPS = 10.0
NAMES = {
    "downpour": "DOWNPOUR",
    "dynsgd": "DynSGD",
    "delay_adaptive": "delay-adaptive",
    "ringmaster": "Ringmaster",
    "fedbuff": "FedBuff",
    "delayed_nesterov": "delayed Nesterov",
    "naive": "Nesterov, not delayed",
    "mla": "MLA",
    "dana_slim": "DANA-Slim",
}
#: The learning rates at which the search begins, by the number of workers.
STARTS = dict.fromkeys(NAMES, (0.05, 0.0125, 0.003)) | {
    "dynsgd": (0.2, 0.2, 0.2),
    "fedbuff": (0.2, 0.2, 0.2),
    "delayed_nesterov": (0.05, 0.05, 0.05),
    "naive": (0.0125, 0.003, 0.0008),
    "dana_slim": (0.0125, 0.006, 0.0015),
}


def _configured(kind: str, n: int, gradients: int) -> Run:
    if kind == "naive":
        return Run("delayed_nesterov", n, 0.0, gradients, TIMING, (("window", 1), ("period", 1)))
    # DANA-Slim has no window: it commits after each step.
    return Run(kind, n, 0.0, gradients, TIMING, () if kind == "dana_slim" else (("window", 1),))


def _at_best(kind: str, n: int, gradients: int) -> Run:
    return searched(_configured(kind, n, gradients), STARTS[kind][WORKERS.index(n)])


def own(kind: str, n: int, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures at the rate that is best for the rule and n."""
    return cell(_at_best(kind, n, gradients), seeds)


def kept(kind: str, n: int, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures at the rate that is best for few workers."""
    rate = _at_best(kind, FEW, gradients).rate
    return cell(replace(_configured(kind, n, gradients), rate=rate), seeds)


def _jobs(scale: Scale) -> dict[str, Job]:
    gradients = scale.budget(BUDGET, MANY)
    found: dict[str, Job] = {}
    for kind in NAMES:
        found |= {f"own/{kind}/{n}": partial(own, kind, n, gradients, scale.seeds(*SEEDS)) for n in WORKERS}
        found |= {f"kept/{kind}/{n}": partial(kept, kind, n, gradients, scale.seeds(*SEEDS)) for n in WORKERS[1:]}
    return found


@dataclass(frozen=True)
class _WorkerFigures:
    """Accuracy by rule and number of workers, with rates chosen for each number or kept from few workers."""

    results: Results

    def __call__(self, kind: str, n: int, choice: str = "own") -> Spread:
        return accuracy(self.results[self.name(kind, n, choice)])

    def name(self, kind: str, n: int, choice: str) -> str:
        """Return the name of the job; with few workers, both choices are the same."""
        return f"{'own' if n == FEW else choice}/{kind}/{n}"

    def lead(self, kind: str, other: str, counts: tuple[int, ...], paper: str) -> Check:
        """Check whether ``kind`` ends above ``other``, each at its own rates."""
        leads = {f"n = {n}": self(kind, n) - self(other, n) for n in counts}
        return Check(
            f"own rates: {NAMES[kind]} ends above {NAMES[other]} with n = {listed(counts)}",
            paper,
            f"by points: {intervals(leads)}",
            all_above(leads.values(), 0),
        )

    def lost(self, kind: str) -> Spread:
        """Return the loss of accuracy from few workers to many, at the same rate."""
        return self(kind, FEW) - self(kind, MANY, "kept")

    def checks(self) -> list[Check]:
        """Return the checks of all criteria."""
        adaptive = ("dynsgd", "delay_adaptive", "ringmaster")
        plain, lost = self.lost("downpour"), {NAMES[kind]: self.lost(kind) for kind in adaptive}
        papers = {
            "dynsgd": "stable where DOWNPOUR diverges, at one rate (thesis, Figures 2.13 to 2.15, n = 20)",
            "delay_adaptive": "the step is limited by the number of workers, not by the longest delay (2206.08307)",
            "ringmaster": "“outperforms existing methods” in time (2501.16168)",
        }
        leads = (
            ("fedbuff", "downpour", (MANY,), "“robust to different staleness distributions” (2106.06639, abstract)"),
            ("delayed_nesterov", "naive", (SOME, MANY), "momentum with stale movements is the “key challenge” that the "
             "delay meets (2401.09135, abstract)"),
            ("mla", "delayed_nesterov", (SOME, MANY), "“consistently outperforms asynchronous and synchronous DiLoCo "
             "methods” (OpenReview 4O8nzTkHPI)"),
        )  # fmt: skip
        return [
            *(self.lead(kind, "downpour", (MANY,), papers[kind]) for kind in adaptive),
            Check(
                f"rate kept from n = {FEW}: DOWNPOUR loses at least {KEEPS:g} points up to n = {MANY}",
                "n = 10 converges, n = 20 diverges at the same rate (thesis, Figure 2.13)",
                f"it loses {plain.interval(1)} points",
                plain.above(KEEPS / 100),
            ),
            Check(
                f"rate kept from n = {FEW}: {listed([*lost])} each lose less than {KEEPS:g} points up to n = {MANY}",
                "not asked so; their steps shrink with the staleness, or what is stale is refused",
                f"they lose points: {intervals(lost, 1, colon=' ')}",
                all_below(lost.values(), KEEPS / 100),
            ),
            *(self.lead(*lead) for lead in leads),
        ]


def _section(results: Results, scale: Scale, folder: Path) -> Section:
    of = _WorkerFigures(results)
    header = ("rule", *(f"n = {n}" for n in WORKERS))
    tables = [
        Table(
            "Final test accuracy (%) at each setting's own rate",
            header,
            [(title, *(at_rate(results[f"own/{kind}/{n}"], kind) for n in WORKERS)) for kind, title in NAMES.items()],
        ),
        Table(
            f"Final test accuracy (%) at the rate that is best for n = {FEW}",
            header,
            [(title, *(of(kind, n, "kept").percent for n in WORKERS)) for kind, title in NAMES.items()],
        ),
    ]
    stale = {n: Spread.of(results[f"own/downpour/{n}"]["staleness"]) for n in WORKERS}
    refused = {n: Spread.of(results[f"own/ringmaster/{n}"]["refused"]) for n in WORKERS}
    text = (
        f"The mean staleness of DOWNPOUR's commits is {listed([one.show(1) for one in stale.values()])} with n = "
        f"{listed(WORKERS)}. Ringmaster refused {listed([one.show(0) for one in refused.values()])} commits."
    )
    setting = (
        f"{scale.budget(BUDGET, MANY):,} mini-batches a run, shared by the workers; windows of 1; heterogeneous "
        "gamma-distributed times (Hakimi et al., Algorithm 12), because equal workers are never staler than the "
        "thresholds of delay-adaptive and Ringmaster, which are then DOWNPOUR; other hyper-parameters at their "
        "defaults. “Nesterov, not delayed” is delayed Nesterov with N = 1, which its paper calls naive. "
        f"{SEARCH}, for each rule and n, on the held-out rows. Then the rate of n = {FEW} is kept for more workers. "
        f"Ringmaster's refused mini-batches are computed again and count once. Seeds {listed(scale.seeds(*SEEDS))}."
    )
    caption = (
        f"Test accuracy over the number of workers, each number with its own rate (left), and with the rate that is "
        f"best for n = {FEW} (right); the axes differ. Bars: one standard deviation."
    )
    return Section(setting, of.checks(), [*tables, text, Figure(_picture(of, folder), caption)])


def _picture(of: _WorkerFigures, folder: Path) -> str:
    figure, axes = draw.panels(2, 1, 4.6)
    titles = {"own": "own rate for each n", "kept": f"rate of n = {FEW} kept"}
    for ax, (choice, text) in zip(axes.flat, titles.items(), strict=True):
        for place, (kind, title) in enumerate(NAMES.items()):
            beside = [n * 1.05 ** (place - 4) for n in WORKERS]  # bars of one n next to each other
            draw.spreads(ax, beside, [of(kind, n, choice) for n in WORKERS], place, title, 100)
        draw.logarithmic(ax, WORKERS)
        lowest = min(of(kind, n, choice).mean for kind in NAMES for n in WORKERS)
        ax.set_ylim(0 if lowest < 0.5 else 100 * lowest - 5, 90)
        draw.finish(ax, "workers n", "test accuracy (%)", text, legend=False)
    draw.legend_below(figure, axes[0, 0], 3)
    return draw.save(figure, folder, "many-workers.png")


CLAIM = Claim(
    name="many-workers",
    title="Rules that mind staleness hold with 64 workers of mixed speeds",
    says="With more workers of different speeds, commits are staler. Counting stale ones for less, refusing them, "
    "collecting commits in a buffer, renewing the momentum once in n of them, or looking ahead along it keeps the "
    "accuracy where DOWNPOUR and plain momentum lose it.",
    source="Hermans 2017, Section 2.3; Koloskova et al. 2022 (arXiv 2206.08307); Maranjyan et al. 2025 (arXiv "
    "2501.16168); Nguyen et al. 2022 (arXiv 2106.06639); Liu et al. 2024 (arXiv 2401.09135); Ajanthan et al. 2025 "
    "(OpenReview 4O8nzTkHPI)",
    jobs=_jobs,
    section=_section,
)
