"""Momentum with many asynchronous workers, and the gap, with learning rates at which training works."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import draw
from reproduction.claims import Check, Claim, Count, Figure, Job, Results, Scale, Section, Table, revised
from reproduction.runs import NOTHING, Run, best, scores, with_curve
from reproduction.spreads import SeedRuns, Spread, all_above, chosen, every, intervals, listed

Grid = tuple[float, ...]
BUDGET, GAP_AT, FAILS, CLOSE = 3000, 8, 10.0, 1.0
NAMES = {
    "asgd": "ASGD",
    "nag_asgd": "NAG-ASGD",
    "multi_asgd": "Multi-ASGD",
    "lwp": "LWP",
    "dc_asgd": "DC-ASGD",
    "dana_slim": "DANA-Slim",
    "dana_zero": "DANA-Zero",
    "dana_dc": "DANA-DC",
}
#: The paper's settings: the strength of the adaptive variant, momentum .95.
OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {"dc_asgd": (("momentum", 0.95), ("compensation", 2.0))}
OTHERS, DANA = ("nag_asgd", "multi_asgd", "lwp", "dc_asgd"), ("dana_slim", "dana_dc")
HETEROGENEOUS = ("nag_asgd", "multi_asgd", "dc_asgd", "dana_slim", "dana_dc")
#: Final test accuracy of ResNet-20 on CIFAR-10, baseline 91.63 %: Table 2, and Table 6 (heterogeneous).
PAPER = {
    8: {"nag_asgd": 90.83, "multi_asgd": 91.28, "dc_asgd": 90.67, "dana_slim": 91.52, "dana_dc": 91.51},
    16: {"nag_asgd": 17.45, "multi_asgd": 84.88, "dc_asgd": 18.35, "dana_slim": 91.02, "dana_dc": 91.01},
    24: {"nag_asgd": 19.81, "multi_asgd": 23.83, "dc_asgd": 17.65, "dana_slim": 89.81, "dana_dc": 89.76},
    32: {"nag_asgd": 12.06, "multi_asgd": 12.04, "dc_asgd": 10.0, "dana_slim": 79.33, "dana_dc": 82.99},
}
PAPER_HETEROGENEOUS = {"nag_asgd": 37.52, "multi_asgd": 74.18, "dc_asgd": 57.62, "dana_slim": 90.52, "dana_dc": 90.33}
BASELINE = 91.63
#: Grids of learning rates by the number of workers; lower for more workers.
RATES: dict[int, Grid] = {
    8: (0.025, 0.0125, 0.005, 0.0025, 0.00125, 0.0006),
    16: (0.0125, 0.005, 0.0025, 0.00125, 0.0006, 0.0003),
    32: (0.005, 0.0025, 0.00125, 0.0006, 0.0003, 0.00015),
}
SINGLE_RATES: Grid = (0.05, 0.025, 0.0125)
#: The choices of the rate for a number of workers: one for all rules, or one for each.
CHOICES = {"common": "one rate for all rules", "own": "each rule's own rate"}
MANY = 16
#: A factor on the commits, for the runs that show the effect of longer training.
LONGER = 4


def _many(scale: Scale) -> tuple[int, ...]:
    return scale.seeds(11, 10)


def _few(scale: Scale) -> tuple[int, ...]:
    return scale.seeds(11, 5)


def prepared(rule: str, n: int, gradients: int, timing: str = "homogeneous") -> Run:
    """Return a run with the paper's settings: decay, warm-up, its own options for DC-ASGD."""
    options = OPTIONS.get(rule, ())
    return Run(rule, n, 0.0, gradients, timing, options, decay=True, warm_up=True, gap=timing == "homogeneous")


def figures(run: Run, seed: int) -> dict[str, float]:
    """Return the figures of one run, and its rate."""
    return {key: value for key, value in with_curve(run, seed).items() if key != "curve"}


def common_rate(n: int, gradients: int, grid: Grid) -> float:
    """Return the rate with the highest accuracy of any rule with ``n`` workers, for all rules."""
    found = [scores(replace(prepared(rule, n, gradients), gap=False), grid) for rule in NAMES]
    return best({rate: max(one[rate] for one in found) for rate in grid})


def with_common_rate(run: Run, grid: Grid, seed: int) -> dict[str, float]:
    """Return the figures at the common rate, which is chosen in the homogeneous environment."""
    return figures(replace(run, rate=common_rate(run.workers, run.gradients, grid)), seed)


def with_own_rate(run: Run, grid: Grid, seed: int) -> dict[str, float]:
    """Return the figures at the rate that is best for the rule."""
    return figures(replace(run, rate=best(scores(replace(run, gap=False), grid))), seed)


def _jobs(scale: Scale) -> dict[str, Job]:
    gradients = scale.budget(BUDGET)
    by_name: dict[str, Job] = {}
    for n, grid in RATES.items():  # by number of workers: the scores for the choice of rates are cached
        for rule in NAMES:
            run = prepared(rule, n, gradients)
            by_name |= {
                f"common/{rule}/{n}/{seed}": partial(with_common_rate, run, grid, seed) for seed in _many(scale)
            }
            by_name |= {f"own/{rule}/{n}/{seed}": partial(with_own_rate, run, grid, seed) for seed in _few(scale)}
    for rule in HETEROGENEOUS:
        run = prepared(rule, 32, gradients, "heterogeneous")
        by_name |= {f"het/{rule}/{seed}": partial(with_common_rate, run, RATES[32], seed) for seed in _many(scale)}
    run = prepared("dana_zero", 1, gradients)
    by_name |= {f"alone/{seed}": partial(with_own_rate, run, SINGLE_RATES, seed) for seed in _many(scale)}
    pairs = {"alone": (run, SINGLE_RATES), "dana_slim": (prepared("dana_slim", MANY, gradients), RATES[MANY])}
    for name, (run, grid) in pairs.items():
        run = replace(run, gradients=LONGER * gradients)
        by_name |= {f"longer/{name}/{seed}": partial(with_own_rate, run, grid, seed) for seed in _few(scale)}
    return by_name


class _MomentumFigures(SeedRuns):
    """Spreads of the runs, and the comparisons of several criteria."""

    def __init__(self, results: Results) -> None:
        super().__init__(results)
        self.alone = self.spread("alone")
        self.longer = {name: self.spread(f"longer/{name}") for name in ("alone", "dana_slim")}

    def of(self, rule: str, n: int, key: str = "accuracy", choice: str = "common") -> Spread:
        """Return a figure in the homogeneous environment."""
        return self.spread(f"{choice}/{rule}/{n}", key)

    def het(self, rule: str) -> Spread:
        """Return the accuracy of 32 workers in the heterogeneous environment."""
        return self.spread(f"het/{rule}")

    def rate(self, case: str) -> float:
        """Return the rate of the case's jobs."""
        (rate,) = {float(one["rate"]) for one in self.runs[case]}
        return rate

    def ratio(self, rule: str, key: str) -> Spread:
        """Return the ratio of a rule's gap to ASGD's, by seed."""
        return Spread.of(np.divide(self.of(rule, GAP_AT, key).values, self.of("asgd", GAP_AT, key).values))

    def gap_checks(self) -> list[Check]:
        """Return the checks of the criteria about the gap."""
        nag, lwp, zero = (self.ratio(rule, "gap") for rule in ("nag_asgd", "lwp", "dana_zero"))
        normalized = self.ratio("dana_zero", "normalized gap")
        return [
            revised(
                f"mean gap at N = {GAP_AT}, rate chosen for that N: NAG-ASGD's above 3 times ASGD's, LWP's between 2 "
                "times ASGD's and NAG-ASGD's, DANA-Zero's below 1.5 times ASGD's",
                "NAG-ASGD “considerably larger”, LWP “only slightly lower”, DANA-Zero “similar” to ASGD (Figure 2(b))",
                f"over ASGD's: NAG-ASGD {nag.show()}, LWP {lwp.show()}, DANA-Zero {zero.show()}",
                every([nag.above(3), lwp.above(2), (nag - lwp).above(0), zero.below(1.5)]),
            ),
            revised(
                f"normalized gap at N = {GAP_AT} (median over the run), rate chosen for that N: DANA-Zero's "
                "within a factor of 1.5 of ASGD's",
                "“roughly similar” (Figure 11(b))",
                f"DANA-Zero's is {normalized.show()} times ASGD's",
                every([normalized.above(1 / 1.5), normalized.below(1.5)]),
            ),
        ]

    def _lead_check(self, choice: str, paper: str) -> Check:
        """Compare DANA with the others, for every N from `MANY` on."""
        verdicts, texts = [], []
        for n in (count for count in RATES if count >= MANY):
            accuracy = {rule: self.of(rule, n, choice=choice) for rule in NAMES}
            leads = {(rule, other): accuracy[rule] - accuracy[other] for rule in DANA for other in OTHERS}
            (rule, other), least = min(leads.items(), key=lambda item: item[1].mean)
            texts.append(f"N = {n}: {least.interval(1)} points ({NAMES[rule]} over {NAMES[other]})")
            verdicts.append(all_above(leads.values(), 0))
        return revised(
            f"from N = {MANY} on, {CHOICES[choice]}: DANA-Slim and DANA-DC both end above NAG-ASGD, Multi-ASGD, LWP "
            "and DC-ASGD",
            paper,
            f"the least lead: {'; '.join(texts)}",
            every(verdicts),
        )

    def accuracy_checks(self) -> list[Check]:
        """Return the checks of the criteria about the accuracy."""
        chosen_rate, slim = f"at N = {MANY}, rate chosen for that N", PAPER[MANY]["dana_slim"]
        nag, multi = self.alone - self.of("nag_asgd", 16), self.alone - self.of("multi_asgd", 32)
        lost, lost_longer = self.alone - self.of("dana_slim", MANY), self.longer["alone"] - self.longer["dana_slim"]
        fails = f"ends at least {FAILS:g} points below the single worker at N ="
        close = f"DANA-Slim ends within {CLOSE:g} point of the single worker {chosen_rate}"
        behind = (
            (f"NAG-ASGD {fails} 16, rate chosen for that N", PAPER[16]["nag_asgd"], nag, nag.above(FAILS / 100)),
            (
                f"Multi-ASGD {fails} 32, rate chosen for that N",
                PAPER[32]["multi_asgd"],
                multi,
                multi.above(FAILS / 100),
            ),
            (close, slim, lost, lost.below(CLOSE / 100)),
            (f"{close}, and {LONGER} times as many commits", slim, lost_longer, lost_longer.below(CLOSE / 100)),
        )
        return [
            self._lead_check("common", "“for any number of workers” (Figure 4)"),
            self._lead_check("own", "not asked: one rate for all"),
            *(
                revised(
                    criterion, f"{paper} against {BASELINE} % (Table 2)", f"behind by {loss.interval(1)} points", met
                )
                for criterion, paper, loss, met in behind
            ),
            self._environment_check(),
        ]

    def _environment_check(self) -> Check:
        taken = [rule for rule in HETEROGENEOUS if max(self.het(rule).mean, self.of(rule, 32).mean) >= NOTHING]
        gains = {NAMES[rule]: self.het(rule) - self.of(rule, 32) for rule in taken}
        return revised(
            f"N = 32, of the rules that are right on {NOTHING:.0%} in either environment: each is more accurate in the "
            "heterogeneous environment than in the homogeneous one",
            "the algorithms “scale better” there (Tables 2 and 6)",
            f"{len(taken)} of {len(HETEROGENEOUS)} rules count; points: {intervals(gains, 1, colon=' ')}",
            all_above(gains.values(), 0) if gains else None,
        )

    def common_table(self) -> Table:
        """Return the accuracies by rule and N at one rate for all rules, and the paper's."""
        header = [f"N = {n} (rate {chosen(self.rate(f'common/asgd/{n}'), grid)})" for n, grid in RATES.items()]
        rows = [
            (
                title,
                *(self.of(rule, n).percent + _bracket(PAPER[n].get(rule)) for n in RATES),
                self.het(rule).percent + _bracket(PAPER_HETEROGENEOUS[rule]) if rule in HETEROGENEOUS else "–",
            )
            for rule, title in NAMES.items()
        ]
        title = "Final test accuracy (%), one rate for all rules; in brackets the paper's (ResNet-20, CIFAR-10)"
        return Table(title, ("rule", *header, "N = 32, heterogeneous"), rows)

    def own_table(self) -> Table:
        """Return the accuracies by rule and N, each with its rate."""

        def cell(rule: str, n: int) -> str:
            return f"{self.of(rule, n, choice='own').percent} at {chosen(self.rate(f'own/{rule}/{n}'), RATES[n])}"

        rows = [(title, *(cell(rule, n) for n in RATES)) for rule, title in NAMES.items()]
        title = "Final test accuracy (%), each rule at the rate that is best for it"
        return Table(title, ("rule", *(f"N = {n}" for n in RATES)), rows)

    def gap_table(self) -> Table:
        """Return the table of gaps of one number of workers."""
        gap, normalized = partial(self.ratio, key="gap"), partial(self.ratio, key="normalized gap")
        return Table(
            f"Mean gap at N = {GAP_AT}, rate {self.rate(f'common/asgd/{GAP_AT}'):g}",
            ("rule", "gap (root mean square)", "over ASGD's", "normalized gap over ASGD's (median)"),
            [
                (title, self.of(rule, GAP_AT, "gap").show(5), gap(rule).show(), normalized(rule).show())
                for rule, title in NAMES.items()
            ],
        )

    def picture(self, folder: Path) -> str:
        """Draw accuracy, with both choices of the rate, and the gap over the number of workers."""
        figure, axes = draw.panels(2, 2, 3.4)
        (common, own), counts = axes[0], tuple(RATES)
        for place, (rule, title) in enumerate(NAMES.items()):
            beside = [n * 1.025 ** (place - 3.5) for n in counts]  # bars of one N next to each other
            draw.spreads(common, beside, [self.of(rule, n) for n in counts], place, title, 100)
            behind = [Spread.of(self.alone.mean - np.array(self.of(rule, n, choice="own").values)) for n in counts]
            draw.spreads(own, beside, behind, place, title, 100)
            for ax, key in zip(axes[1], ("gap", "normalized gap"), strict=True):
                draw.until_infinite(ax, beside, [self.of(rule, n, key) for n in counts], place, title)
        common.axhline(100 * self.alone.mean, color="black", linewidth=0.8)
        common.set_ylim(0, 100)
        title = f"{CHOICES['common']}; line: a single worker"
        draw.finish(common, "workers N", "final test accuracy (%)", title, legend=False)
        own.set_ylim(bottom=0)
        draw.finish(own, "workers N", "points behind a single worker", CHOICES["own"], legend=False)
        for ax, title in zip(axes[1], ("mean gap", "normalized gap"), strict=True):
            ax.set_yscale("log")
            draw.finish(ax, "workers N", f"{title} (RMS)", CHOICES["common"], legend=False)
        for ax in axes.flat:
            draw.logarithmic(ax, counts)
        draw.legend_below(figure, axes[0, 0], 4)
        return draw.save(figure, folder, "momentum.png")


def _section(results: Results, scale: Scale, folder: Path) -> Section:
    found = _MomentumFigures(results)
    single = chosen(found.rate("alone"), SINGLE_RATES)
    setting = (
        f"{scale.budget(BUDGET):,} commits a run; momentum 0.9 (DC-ASGD 0.95 and λ = 2, as the paper set it; DANA-DC "
        "λ = 2); warm-up from η/N over the first sixteenth, a tenth at one half and at three quarters; homogeneous "
        "gamma times; YellowFin is not implemented. For each N one rate for all rules: that with which the best of the "
        "eight is best on held-out rows with seed 0, any of them. In addition, each rule runs with its own best rate, "
        f"which the paper does not do. Rates: {'; '.join(f'{listed(grid)} (N = {n})' for n, grid in RATES.items())}. "
        f"The single worker: {found.alone.percent} % with a rate of {single}, and {found.longer['alone'].percent} % "
        f"with {LONGER} times as many commits. Seeds {_many(scale)[0]} to "
        f"{_many(scale)[-1]}; with rules' own rates, and with more commits, {_few(scale)[0]} to {_few(scale)[-1]}."
    )
    caption = (
        "Above: final test accuracy over the number of workers, and how far it is behind a single worker; shifted "
        "a little sideways, so that bars do not hide each other. Below: the mean gap and the normalized one. A cross "
        "would mean that runs with more workers were no longer finite."
    )
    tables = [found.common_table(), found.own_table(), found.gap_table()]
    checks = [*found.gap_checks(), *found.accuracy_checks()]
    return Section(setting, checks, [*tables, Figure(found.picture(folder), caption)])


def _bracket(value: float | None) -> str:
    return "" if value is None else f" ({value:.2f})"


CLAIM = Claim(
    name="momentum",
    title="Momentum breaks with many asynchronous workers, and DANA mends it",
    says="With momentum the gap between the parameters that a gradient is computed and applied at grows until training "
    "fails; DANA's look-ahead keeps it near that of plain ASGD, and so scales further. Predicting linearly (LWP), a "
    "momentum for each worker (Multi-ASGD) and compensation (DC-ASGD) help less.",
    source="Hakimi et al. 2019, Figures 2, 4, 6, 11, Tables 2 and 6",
    jobs=_jobs,
    section=_section,
    before=Count(4, 8),
)
