"""Claim 6: momentum with many asynchronous workers, and the gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from reproduction.claims import Claim, Criteria, Job, Results, Scale, over_seeds
from reproduction.parts import Check, Section, Table
from reproduction.runs import Run, best_rate, train
from reproduction.spreads import Spread, listed, points

BUDGET, GAP_AT, FAILS, CLOSE = 3000, 8, 10.0, 1.0
#: A factor on the rate, for runs without a criterion: where training works, gaps are more informative.
QUARTER = 0.25
#: Accuracy below which a model has learned next to nothing.
NOTHING = 0.15
RATES = (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)
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


def workers(scale: Scale) -> Sequence[int]:
    """Return the numbers of workers, N."""
    return scale.pick((8, 16, 24, 32), (4, 8, 12, 16, 20, 24, 28, 32))


def prepared(rule: str, n: int, gradients: int, timing: str = "homogeneous") -> Run:
    """Return a run with the paper's settings: decay, warm-up, its own options for DC-ASGD."""
    options = OPTIONS.get(rule, ())
    return Run(rule, n, 0.0, gradients, timing, options, decay=True, warm_up=True, gap=timing == "homogeneous")


@cache
def baseline_rate(gradients: int) -> float:
    """Return the rate tuned for a single worker with Nesterov's momentum; all rules run with it, as in the paper."""
    return best_rate(prepared("dana_zero", 1, gradients), RATES)


def with_baseline_rate(run: Run, seed: int, factor: float = 1.0) -> dict[str, Any]:
    """Return the figures of ``run`` with ``factor`` times the rate of `baseline_rate`."""
    rate = baseline_rate(run.gradients) * factor
    return {"rate": rate, **train(replace(run, rate=rate), seed)}


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of claim 6."""
    gradients = scale.budget(BUDGET)
    runs = {f"{rule}/{n}": prepared(rule, n, gradients) for rule in NAMES for n in workers(scale)}
    runs |= {f"het/{rule}": prepared(rule, 32, gradients, "heterogeneous") for rule in HETEROGENEOUS}
    runs["baseline"] = prepared("dana_zero", 1, gradients)
    by_name: dict[str, Job] = {
        f"quarter/{rule}/{seed}": partial(with_baseline_rate, prepared(rule, GAP_AT, gradients), seed, QUARTER)
        for rule in NAMES
        for seed in scale.seeds
    }
    return by_name | {
        f"{name}/{seed}": partial(with_baseline_rate, run, seed) for name, run in runs.items() for seed in scale.seeds
    }


class _MomentumFigures:
    """Spreads of the runs, and the comparisons of several criteria.

    Args:
        results: of the claim's jobs.
        scale: how much was run.
    """

    def __init__(self, results: Results, scale: Scale) -> None:
        self.results, self.scale = results, scale
        self.counts = workers(scale)
        self.baseline = over_seeds(results, "baseline", scale, "accuracy")
        self.het = {rule: over_seeds(results, f"het/{rule}", scale, "accuracy") for rule in HETEROGENEOUS}
        self.gap = {rule: self.of(rule, GAP_AT, "gap").mean / self.of("asgd", GAP_AT, "gap").mean for rule in NAMES}
        self.normalized = {rule: self.of(rule, GAP_AT, "normalized gap").mean for rule in NAMES}

    def of(self, rule: str, n: int, key: str = "accuracy") -> Spread:
        """Return a figure in the homogeneous environment."""
        return over_seeds(self.results, f"{rule}/{n}", self.scale, key)

    def gap_checks(self) -> list[Check]:
        """Return the checks of the criteria about the gap."""
        gap, counts = self.gap, self.counts
        ratio = self.normalized["dana_zero"] / self.normalized["asgd"]
        grows = [self.of("asgd", n, "gap").mean for n in counts]
        return [
            Check(
                f"mean gap at N = {GAP_AT}: NAG-ASGD's above 3 times ASGD's, LWP's between 2 times ASGD's and "
                "NAG-ASGD's, DANA-Zero's below 1.5 times ASGD's",
                "NAG-ASGD “considerably larger”, LWP “only slightly lower”, DANA-Zero “similar” to ASGD (Figure 2(b))",
                f"over ASGD's: NAG-ASGD {gap['nag_asgd']:.2f}, LWP {gap['lwp']:.2f}, DANA-Zero {gap['dana_zero']:.2f}",
                gap["nag_asgd"] > 3 and 2 < gap["lwp"] < gap["nag_asgd"] and gap["dana_zero"] < 1.5,
            ),
            Check(
                f"normalized gap at N = {GAP_AT} (median over the run): DANA-Zero's within a factor of 1.5 of ASGD's",
                "“roughly similar” (Figure 11(b))",
                f"DANA-Zero's is {ratio:.2f} times ASGD's",
                1 / 1.5 < ratio < 1.5,
            ),
            Check(
                "ASGD's mean gap grows with every further N",
                "it does (Figure 2(a))",
                f"{listed([f'{value:.2e}' for value in grows])} for N = {listed(counts)}",
                all(a < b for a, b in pairwise(grows)),
            ),
        ]

    def accuracy_checks(self) -> list[Check]:
        """Return the checks of the criteria about the accuracy."""
        of, baseline = self.of, self.baseline
        many = [n for n in self.counts if n >= 16]
        best = {(rule, n): of(rule, n).mean for rule in (*OTHERS, *DANA) for n in many}
        above = [n for n in many if min(best[rule, n] for rule in DANA) > max(best[rule, n] for rule in OTHERS)]
        lost = {case: points(baseline, of(*case)) for case in (("nag_asgd", 16), ("multi_asgd", 24), ("dana_slim", 16))}
        return [
            Check(
                "from N = 16 on, DANA-Slim and DANA-DC both end above NAG-ASGD, Multi-ASGD, LWP and DC-ASGD (means)",
                "“for any number of workers” (Figure 4)",
                f"at N = {listed(above)}" if above else "at no N",
                above == many,
            ),
            Check(
                f"NAG-ASGD ends at least {FAILS:g} points below the single worker at N = 16",
                f"{PAPER[16]['nag_asgd']} against {BASELINE} % (Table 2)",
                f"{of('nag_asgd', 16).percent} against {baseline.percent}",
                lost["nag_asgd", 16] >= FAILS,
            ),
            Check(
                f"Multi-ASGD ends at least {FAILS:g} points below the single worker at N = 24",
                f"{PAPER[24]['multi_asgd']} against {BASELINE} % (Table 2)",
                f"{of('multi_asgd', 24).percent} against {baseline.percent}",
                lost["multi_asgd", 24] >= FAILS,
            ),
            Check(
                f"DANA-Slim ends within {CLOSE:g} point of the single worker at N = 16",
                f"{PAPER[16]['dana_slim']} against {BASELINE} % (Table 2)",
                f"{of('dana_slim', 16).percent} against {baseline.percent}",
                lost["dana_slim", 16] <= CLOSE,
            ),
            self._environment_check(),
        ]

    def _environment_check(self) -> Check:
        of, het = self.of, self.het
        nothing = [NAMES[rule] for rule in HETEROGENEOUS if max(het[rule].mean, of(rule, 32).mean) < NOTHING]
        easier = [rule for rule in HETEROGENEOUS if het[rule].mean > of(rule, 32).mean]
        return Check(
            "N = 32: every rule is more accurate in the heterogeneous environment than in the homogeneous one",
            "the algorithms “scale better” there (Tables 2 and 6)",
            listed([f"{NAMES[rule]} {of(rule, 32).percent} → {het[rule].percent}" for rule in HETEROGENEOUS])
            + (f"; {listed(nothing)} learned next to nothing in either" if nothing else ""),
            len(easier) == len(HETEROGENEOUS),
        )

    def accuracy_table(self) -> Table:
        """Return the table of accuracies next to the paper's."""
        of, het = self.of, self.het
        in_paper = [n for n in self.counts if n in PAPER]
        return Table(
            "Final test accuracy (%), here and in brackets in the paper (ResNet-20, CIFAR-10)",
            ("rule", *(f"N = {n}" for n in in_paper), "N = 32, heterogeneous"),
            [
                (
                    title,
                    *(of(rule, n).percent + _bracket(PAPER[n].get(rule)) for n in in_paper),
                    het[rule].percent + _bracket(PAPER_HETEROGENEOUS[rule]) if rule in het else "–",
                )
                for rule, title in NAMES.items()
            ],
        )

    def gap_table(self) -> Table:
        """Return the table of gaps of one number of workers, at both rates."""
        of, gap, normalized = self.of, self.gap, self.normalized
        keys = ("accuracy", "gap", "normalized gap")
        quarter = {
            rule: {key: over_seeds(self.results, f"quarter/{rule}", self.scale, key) for key in keys} for rule in NAMES
        }
        return Table(
            f"Mean gap at N = {GAP_AT}; on the right with {QUARTER:g} of the learning rate (no criterion)",
            (
                "rule",
                "gap (root mean square)",
                "over ASGD's",
                "normalized gap (median)",
                "accuracy (%), lower rate",
                "gap over ASGD's, lower rate",
                "normalized gap over ASGD's, lower rate",
            ),
            [
                (
                    title,
                    of(rule, GAP_AT, "gap").show(5),
                    f"{gap[rule]:.2f}",
                    f"{normalized[rule]:.2e}",
                    quarter[rule]["accuracy"].percent,
                    *(f"{quarter[rule][k].mean / quarter['asgd'][k].mean:.2f}" for k in ("gap", "normalized gap")),
                )
                for rule, title in NAMES.items()
            ],
        )


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 6, from its figures."""
    figures = _MomentumFigures(results, scale)
    baseline = figures.baseline
    failed = [title for rule, title in NAMES.items() if figures.of(rule, GAP_AT).mean < NOTHING]
    rate = results[f"baseline/{scale.seeds[0]}"]["rate"]
    setting = (
        f"{scale.budget(BUDGET):,} commits a run; momentum 0.9 (DC-ASGD 0.95 and λ = 2, as the paper set it; DANA-DC "
        f"λ = 2); the learning rate tuned for a single worker with Nesterov's momentum, {rate:g} of {listed(RATES)}, "
        "for all rules and N, as in the paper; warm-up from η/N over the first sixteenth, a tenth at one half and at "
        f"three quarters. Homogeneous gamma times. The single worker: {baseline.percent} %. YellowFin is not "
        f"implemented. Seeds {listed(scale.seeds)}."
    )
    text = (
        "DANA-Slim's parameters are DANA-Zero's look-ahead: its gap is that of another frame, and not comparable. "
        + (f"At the full rate, {listed(failed)} learned next to nothing; so their gaps say little." if failed else "")
    )
    return Section(
        setting,
        [*figures.gap_checks(), *figures.accuracy_checks()],
        [figures.accuracy_table(), figures.gap_table(), text],
    )


def _bracket(value: float | None) -> str:
    return "" if value is None else f" ({value:.2f})"


CLAIM = Claim(
    name="momentum",
    title="Momentum breaks with many asynchronous workers, and DANA mends it",
    says="With momentum the gap between the parameters that a gradient is computed and applied at grows until training "
    "fails; DANA's look-ahead keeps it near that of plain ASGD, and so scales further. Predicting linearly (LWP), a "
    "momentum for each worker (Multi-ASGD) and compensation (DC-ASGD) help less.",
    source="Hakimi et al. 2019, Figures 2, 4, 6, 11, Tables 2 and 6",
    first=Criteria(jobs, section),
)
