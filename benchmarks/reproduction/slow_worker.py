"""Time to an accuracy while one worker of eight is four times slower."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import draw
from reproduction.claims import Check, Claim, Figure, Job, Results, Scale, Section, Table
from reproduction.runs import SEARCH, Run, cell, figures, held_out, ladder, searched
from reproduction.spreads import Spread, all_above, chosen, intervals, listed

WORKERS, TARGET, FACTOR = 8, 0.75, 4
#: Mini-batches of a run by the window: with a long window, DOWNPOUR needs more to reach the target.
BUDGETS = {1: 4000, 8: 10_000}
WINDOWS = tuple(BUDGETS)
SHORT, LONG = WINDOWS
SLOW, EQUAL = "one slow worker", "equal workers"
NAMES = {
    "downpour": "DOWNPOUR",
    "dynsgd": "DynSGD",
    "delay_adaptive": "delay-adaptive",
    "ringmaster": "Ringmaster",
    "dylu": "DOWNPOUR + DyLU",
}
#: All rules except DyLU, which has no effect on windows of 1.
ALWAYS = tuple(NAMES)[:-1]
#: Rule, window and speeds of each setting.
CASES = (
    *((rule, SHORT, SLOW) for rule in ALWAYS),
    *((rule, LONG, SLOW) for rule in NAMES),
    *(("downpour", window, EQUAL) for window in WINDOWS),
)
#: The learning rates at which the search begins, by window.
STARTS = dict.fromkeys(NAMES, (0.05, 0.006)) | {"dynsgd": (0.2, 0.1)}
#: The factor by which the same number of steps takes longer with the slow worker.
WORK = WORKERS / (WORKERS - 1 + 1 / FACTOR)


def _run(rule: str, window: int, gradients: int, timing: str) -> Run:
    if rule == "dylu":
        return Run("downpour", WORKERS, 0.0, gradients, timing, (("window", "by_speed"), ("window_max", window)))
    return Run(rule, WORKERS, 0.0, gradients, timing, (("window", window),))


@cache
def _speed(run: Run, seed: int) -> float:
    """Return a score above 1 that falls with the time to the target; if it is not reached, the held-out accuracy."""
    time = figures(run, seed, TARGET)["reached"]
    return 1 + 1 / time if math.isfinite(time) else held_out(run, seed)


def measured(rule: str, window: int, gradients: int, timing: str, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures of a rule at the rate with which it reaches the target first."""
    run = _run(rule, window, gradients, timing)
    return cell(searched(run, STARTS[rule][WINDOWS.index(window)], _speed), seeds, TARGET)


def _jobs(scale: Scale) -> dict[str, Job]:
    return {
        _name(rule, window, timing): partial(
            measured, rule, window, scale.budget(BUDGETS[window], LONG), timing, scale.seeds(1, 10)
        )
        for rule, window, timing in CASES
    }


def _name(rule: str, window: int, timing: str = SLOW) -> str:
    return f"{rule}/{window}" if timing == SLOW else f"{timing}/{rule}/{window}"


@dataclass(frozen=True)
class _TimeFigures:
    """Times to the target of the training accuracy, in mean step times of an equal worker, by setting."""

    results: Results

    def __call__(self, rule: str, window: int, timing: str = SLOW) -> Spread:
        return Spread.of(self.results[_name(rule, window, timing)]["reached"])

    def earlier(self, rule: str, other: str = "downpour") -> Check:
        """Check whether ``rule`` reaches the target before ``other``, with each of its windows."""
        windows = [window for window in WINDOWS if _name(rule, window) in self.results]
        saved = {f"λ = {window}": self(other, window) - self(rule, window) for window in windows}
        paper = {
            "dynsgd": "a stale commit counts for less (thesis, Section 2.3.2); not measured so",
            "delay_adaptive": "the number of workers limits the step, not the longest delay (2206.08307, Theorem 8)",
            "ringmaster": "“optimal time complexity” for any speeds (2501.16168, abstract)",
            "dylu": "“adjusts the workers' local training steps” to their speed (2401.09135, abstract)",
        }
        against = "faster than Delay-Adaptive ASGD in the experiments (2501.16168, Section G)"
        return Check(
            f"{NAMES[rule]} is at {TARGET:.0%} before {NAMES[other]}, with λ of {listed(windows)}",
            paper[rule] if other == "downpour" else against,
            f"{intervals(saved, 1, 1)} mean step times earlier",
            all_above(saved.values(), 0),
        )

    def control(self) -> Check:
        """Check whether the slow worker does more harm than by its missing steps."""
        with np.errstate(invalid="ignore"):  # the time to an unreached target is infinite, and decides nothing
            ratios = {
                window: Spread.of(np.divide(self("downpour", window).values, self("downpour", window, EQUAL).values))
                for window in WINDOWS
            }
        return Check(
            f"the slow worker costs DOWNPOUR more than the steps that are not taken, a factor of {WORK:.2f}, with λ of "
            f"{listed(WINDOWS)}",
            "the longest delay limits the step, and so the speed, of plain asynchronous SGD (2206.08307)",
            "; ".join(f"λ = {window}: {one.show()} times as long" for window, one in ratios.items()),
            all_above(ratios.values(), WORK),
        )


def _section(results: Results, scale: Scale, folder: Path) -> Section:
    of = _TimeFigures(results)
    checks = [of.control(), *(of.earlier(rule) for rule in NAMES if rule != "downpour")]
    checks.append(of.earlier("ringmaster", "delay_adaptive"))
    table = Table(
        f"Time until the training accuracy is at {TARGET:.0%}",
        ("rule", "λ", "rate", "time (mean step times)", "test accuracy at the end (%)", "refused commits"),
        [_row(of, *case) for case in CASES],
    )
    budgets = [f"{scale.budget(one, LONG):,}" for one in BUDGETS.values()]
    setting = (
        f"n = {WORKERS}, one of them {FACTOR} times slower than the others; gamma-distributed times with a coefficient "
        f"of variation of 0.1; an exchange takes no time. {listed(budgets)} mini-batches a run with λ of "
        f"{listed(WINDOWS)} that are applied; those that Ringmaster refuses come on top, and take their time. DyLU has "
        f"windows of at most {LONG}, in as many commits. The mean step time is that of a worker that is not slow. "
        f"{SEARCH}, for each rule and λ, by the time; the target and the numbers of mini-batches were set after trials "
        "with seed 0. Rules' thresholds at their defaults: T = n, R = 2n, P = 1. Seeds "
        f"{scale.seeds(1, 10)[0]} to {scale.seeds(1, 10)[-1]}."
    )
    caption = (
        f"Time until the training accuracy is at {TARGET:.0%}, by seed (dots), with the mean's 95 % interval. DyLU "
        "does nothing to windows of 1."
    )
    return Section(setting, checks, [table, Figure(_picture(of, folder), caption)])


def _row(of: _TimeFigures, rule: str, window: int, timing: str) -> tuple[str, ...]:
    found, time = of.results[_name(rule, window, timing)], of(rule, window, timing)
    return (
        NAMES[rule] + ("" if timing == SLOW else ", equal workers"),
        str(window),
        chosen(found["rate"], ladder(rule)),
        time.show(1) if math.isfinite(time.mean) else "not reached with every seed",
        Spread.of(found["accuracy"]).percent,
        Spread.of(found["refused"]).show(0) if rule == "ringmaster" else "–",
    )


def _picture(of: _TimeFigures, folder: Path) -> str:
    figure, axes = draw.panels(2, 1, 3.2)
    for ax, window in zip(axes.flat, WINDOWS, strict=True):
        bars = {
            "DOWNPOUR,\nequal workers": of("downpour", window, EQUAL),
            **{NAMES[rule]: of(rule, window) for rule in ALWAYS},
            "DOWNPOUR\n+ DyLU": of("dylu", window) if window == LONG else Spread(()),
        }
        for place, spread in enumerate(bars.values()):
            color = draw.COLORS[place % len(draw.COLORS)]
            values = [value for value in spread.values if math.isfinite(value)]
            ax.plot(values, [place] * len(values), ".", color=color, alpha=0.5)
            if spread.values and math.isfinite(spread.mean):
                ax.errorbar(spread.mean, place + 0.2, xerr=spread.error, fmt="o", color=color, capsize=3, markersize=5)
        ax.set_yticks(range(len(bars)), list(bars))
        ax.set_ylim(len(bars) - 0.4, -0.6)
        ax.set_xlim(left=0)
        draw.finish(ax, "time (mean step times)", "", f"λ = {window}", legend=False)
    axes[0, 1].set_yticklabels([])
    return draw.save(figure, folder, "slow-worker.png")


CLAIM = Claim(
    name="slow-worker",
    title="Rules that mind staleness are sooner at an accuracy when one worker is slow",
    says="A worker that is always late commits what was computed far in the past. Refusing such commits and computing "
    "them again (Ringmaster), counting them for less (delay-adaptive, DynSGD), or giving the slow worker fewer steps a "
    "window (DyLU) lets the others go on at a higher rate.",
    source="Maranjyan et al. 2025 (arXiv 2501.16168); Koloskova et al. 2022 (arXiv 2206.08307); Liu et al. 2024 (arXiv "
    "2401.09135); Hermans 2017, Section 2.3.2",
    jobs=_jobs,
    section=_section,
)
