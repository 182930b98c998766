"""Claims 7 and 8: delay compensation without momentum; ordered momentum and its rivals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.claims import Claim, Criteria, Job, Results, Scale
from reproduction.parts import Check, Section, Table
from reproduction.runs import Run, train, tuned
from reproduction.spreads import Spread, chosen, listed, points

BUDGET = 3000
DC_WORKERS, DC_RATES, NEAR = (4, 8), (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625), 0.5
CONSTANT, ADAPTIVE = (0.04, 0.5), (0.5, 2.0)
DC_NAMES = {"asgd": "ASGD", "ssgd": "SSGD", "dc_c": "DC-ASGD-c", "dc_a": "DC-ASGD-a"}


def compensated(adaptive: bool, n: int, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return figures of DC-ASGD with the better of two strengths, each at its best rate, by held-out accuracy."""
    options: list[tuple[tuple[str, Any], ...]] = [
        (("adaptive", adaptive), ("compensation", strength)) for strength in (ADAPTIVE if adaptive else CONSTANT)
    ]
    found = {}
    for option in options:
        run = Run("dc_asgd", n, 0.0, gradients, options=option, decay=True)
        rates = {rate: train(replace(run, rate=rate), 0, "held out")["accuracy"] for rate in DC_RATES}
        best = max(sorted(rates), key=rates.__getitem__)
        found[option] = (rates[best], best)
    option = max(found, key=lambda one: found[one][0])
    run = Run("dc_asgd", n, found[option][1], gradients, options=option, decay=True)
    strength = dict(option)["compensation"]
    return {"rate": run.rate, "grid": list(DC_RATES), "strength": strength, "run": [train(run, seed) for seed in seeds]}


def dc_jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of claim 7."""
    gradients = scale.budget(BUDGET)
    by_name: dict[str, Job] = {"sgd": partial(tuned, Run("asgd", 1, 0.0, gradients, decay=True), DC_RATES, scale.seeds)}
    for n in DC_WORKERS:
        for rule in ("asgd", "ssgd"):
            # n gradients of a round make one step with their mean: the rate grows with n.
            grid = tuple(rate * n for rate in DC_RATES) if rule == "ssgd" else DC_RATES
            by_name[f"{rule}/{n}"] = partial(tuned, Run(rule, n, 0.0, gradients, decay=True), grid, scale.seeds)
        by_name[f"dc_c/{n}"] = partial(compensated, False, n, gradients, scale.seeds)
        by_name[f"dc_a/{n}"] = partial(compensated, True, n, gradients, scale.seeds)
    return by_name


def _spread(results: Results, name: str, key: str = "accuracy", variant: str = "run") -> Spread:
    return Spread.of([one[key] for one in results[name][variant]])


def dc_section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 7, from its figures."""
    setting = (
        f"{scale.budget(BUDGET):,} mini-batches a run, no momentum, a tenth of the rate at one half and at three "
        f"quarters; rates of {listed(DC_RATES)} (SSGD, whose step takes M gradients: M times these), strengths λ0 of "
        f"{listed(CONSTANT)} for -c and {listed(ADAPTIVE)} for -a, all chosen for each rule and M with seed 0 on "
        f"held-out rows. The scan of the paper has lost its digits, so that no figure can be quoted; M follows the "
        f"published version. Seeds {listed(scale.seeds)}."
    )
    return Section(setting, _dc_checks(results), [_dc_table(results)])


def _dc_checks(results: Results) -> list[Check]:
    of = partial(_spread, results)
    sgd, most = of("sgd"), DC_WORKERS[-1]
    ahead = {
        (rule, n): of(f"{rule}/{n}").mean - of(f"asgd/{n}").mean > max(of(f"{rule}/{n}").sd, of(f"asgd/{n}").sd)
        for rule in ("dc_c", "dc_a")
        for n in DC_WORKERS
    }
    against = {n: (of(f"dc_a/{n}"), of(f"asgd/{n}"), of(f"ssgd/{n}")) for n in DC_WORKERS}
    distance = {n: points(sgd, against[n][0]) for n in DC_WORKERS}
    lost = "the figure is lost in the scan"
    return [
        Check(
            "DC-ASGD-c and DC-ASGD-a end above ASGD by more than the larger standard deviation, for both M",
            f"“significantly better than ASGD and SSGD” (Table 1; {lost})",
            "; ".join(
                f"M = {n}: ASGD {of(f'asgd/{n}').percent}, -c {of(f'dc_c/{n}').percent}, -a {of(f'dc_a/{n}').percent}"
                for n in DC_WORKERS
            ),
            all(ahead.values()),
        ),
        Check(
            f"DC-ASGD-a ends above SSGD at M = {most} (means)",
            f"it does (Table 1; {lost})",
            f"{against[most][0].percent} against {against[most][2].percent}",
            against[most][0].mean > against[most][2].mean,
        ),
        Check(
            f"DC-ASGD-a ends within {NEAR} points of sequential SGD, or above it, for both M",
            f"“catches up with sequential SGD” (Section 6.1; {lost})",
            f"SGD {sgd.percent}; behind it by {listed([distance[n] for n in DC_WORKERS], 2)} points "
            f"(M = {listed(DC_WORKERS)})",
            max(distance.values()) <= NEAR,
        ),
    ]


def _dc_table(results: Results) -> Table:
    of = partial(_spread, results)
    rows: list[tuple[str, ...]] = [
        ("SGD", "1", chosen(results["sgd"]["rate"], results["sgd"]["grid"]), of("sgd").percent)
    ]
    for n in DC_WORKERS:
        for rule, title in DC_NAMES.items():
            own = results[f"{rule}/{n}"]
            extra = f", λ0 = {own['strength']:g}" if "strength" in own else ""
            rows.append((title, str(n), chosen(own["rate"], own["grid"]) + extra, of(f"{rule}/{n}").percent))
    return Table("Final test accuracy", ("rule", "M", "chosen", "test accuracy (%)"), rows)


DELAY_COMPENSATION = Claim(
    name="compensation",
    title="Delay compensation makes ASGD as good as sequential SGD",
    says="Correcting a late gradient to first order for the way the parameters have gone makes asynchronous SGD more "
    "accurate than both ASGD and SSGD, and nearly as accurate as sequential SGD.",
    source="Zheng et al. 2017, Section 6, Table 1",
    first=Criteria(dc_jobs, dc_section),
)

NAMES = {
    "asgd": "ASGD",
    "asgdm": "naive ASGDm",
    "shifted_momentum": "shifted momentum",
    "smega2": "SMEGA²",
    "ormo": "OrMo",
}
WORKERS = (16, 64)
RATES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
SAME, MUCH = 1.0, 2.0
ENVIRONMENTS = {"homogeneous": "run", "slow workers": "slow workers"}
#: Test accuracy on CIFAR-10, Table 1, by K and environment.
PAPER = {
    ("asgd", 16, "homogeneous"): 89.77,
    ("asgd", 64, "homogeneous"): 83.14,
    ("asgd", 16, "slow workers"): 89.73,
    ("asgd", 64, "slow workers"): 83.94,
    ("asgdm", 16, "homogeneous"): 88.15,
    ("asgdm", 64, "homogeneous"): 82.39,
    ("asgdm", 16, "slow workers"): 73.23,
    ("asgdm", 64, "slow workers"): 68.75,
    ("shifted_momentum", 16, "homogeneous"): 90.23,
    ("shifted_momentum", 64, "homogeneous"): 83.72,
    ("shifted_momentum", 16, "slow workers"): 89.95,
    ("shifted_momentum", 64, "slow workers"): 83.99,
    ("smega2", 16, "homogeneous"): 90.60,
    ("smega2", 64, "homogeneous"): 86.82,
    ("smega2", 16, "slow workers"): 90.88,
    ("smega2", 64, "slow workers"): 86.89,
    ("ormo", 16, "homogeneous"): 90.95,
    ("ormo", 64, "homogeneous"): 88.03,
    ("ormo", 16, "slow workers"): 91.01,
    ("ormo", 64, "slow workers"): 87.76,
}


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of claim 8."""
    by_name: dict[str, Job] = {}
    for rule in NAMES:
        for n in WORKERS:
            run = Run(rule, n, 0.0, scale.budget(BUDGET), decay=True)
            variants = {"slow workers": replace(run, timing="slow workers")}
            by_name[f"{rule}/{n}"] = partial(tuned, run, RATES, scale.seeds, **variants)
    return by_name


Setting = tuple[int, str]
#: All pairs of K and environment.
SETTINGS: list[Setting] = [(n, environment) for n in WORKERS for environment in ENVIRONMENTS]


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 8, from its figures."""
    table = Table(
        "Final test accuracy (%), here and in brackets in the paper (ResNet-20, CIFAR-10)",
        ("rule", *(f"K = {n}, {environment}" for n, environment in SETTINGS), "rates chosen"),
        [
            (
                title,
                *(f"{_spread_of(results, rule, s).percent} ({PAPER[(rule, *s)]:.2f})" for s in SETTINGS),
                listed([chosen(results[f"{rule}/{n}"]["rate"], RATES) for n in WORKERS]),
            )
            for rule, title in NAMES.items()
        ],
    )
    setting = (
        f"{scale.budget(BUDGET):,} mini-batches a run, momentum 0.9, a tenth of the rate at one half and at three "
        f"quarters. For each rule and K the rate of {listed(RATES)} that is best with seed 0 in the homogeneous "
        "environment, used in both. Slow workers: K/16 of them, ten times slower. Seeds "
        f"{listed(scale.seeds)}. Only CIFAR-10's table is compared."
    )
    return Section(setting, _checks(results), [table])


def _spread_of(results: Results, rule: str, setting: Setting, key: str = "accuracy") -> Spread:
    n, environment = setting
    return _spread(results, f"{rule}/{n}", key, ENVIRONMENTS[environment])


def _checks(results: Results) -> list[Check]:
    of = partial(_spread_of, results)
    winners = {s: max((of(rule, s).mean, rule) for rule in NAMES)[1] for s in SETTINGS}
    won = [setting for setting in SETTINGS if winners[setting] == "ormo"]
    naive = [setting for setting in SETTINGS if of("asgdm", setting).mean < of("asgd", setting).mean]
    change = {n: points(of("ormo", (n, "slow workers")), of("ormo", (n, "homogeneous"))) for n in WORKERS}
    lead = {
        environment: points(of("ormo", (64, environment)), of("asgd", (64, environment)))
        for environment in ENVIRONMENTS
    }
    losses = {s: min((of(rule, s, "training loss").mean, rule) for rule in NAMES)[1] for s in SETTINGS}
    return [
        Check(
            "OrMo has the highest mean test accuracy of the five in all four settings",
            "it has (Table 1)",
            f"in {len(won)} of {len(SETTINGS)}; the highest: "
            + listed([f"{NAMES[winners[s]]} (K = {s[0]}, {s[1]})" for s in SETTINGS]),
            len(won) == len(SETTINGS),
        ),
        Check(
            f"K = 64: OrMo ends at least {MUCH:g} points above ASGD in both environments",
            "4.89 and 3.82 points (Table 1)",
            f"{listed(list(lead.values()), 2)} points ({listed(list(lead))})",
            min(lead.values()) >= MUCH,
        ),
        Check(
            "naive ASGDm ends below ASGD in all four settings (means)",
            "it does; with slow workers it sometimes fails to converge (Table 1)",
            f"in {len(naive)} of {len(SETTINGS)}",
            len(naive) == len(SETTINGS),
        ),
        Check(
            f"slow workers change OrMo's accuracy by at most {SAME:g} point, for both K",
            "+0.06 and −0.27 points (Table 1)",
            f"{listed([f'{value:+.2f}' for value in change.values()])} points (K = {listed(WORKERS)})",
            max(abs(value) for value in change.values()) <= SAME,
        ),
        Check(
            "OrMo has the lowest training loss of the five in all four settings (means)",
            "it has, or shares it (Table 1)",
            "the lowest: " + listed([f"{NAMES[losses[s]]} (K = {s[0]}, {s[1]})" for s in SETTINGS]),
            all(rule == "ormo" for rule in losses.values()),
        ),
    ]


ORDERED = Claim(
    name="ormo",
    title="Ordered momentum is the best asynchronous momentum, and does not mind slow workers",
    says="OrMo ends more accurate than ASGD, naive ASGDm, shifted momentum and SMEGA² with 16 and with 64 workers; "
    "slow workers do not affect it, whereas naive ASGDm impedes convergence.",
    source="Shi et al. 2024, Section 4, Table 1, Figures 3 and 6",
    first=Criteria(jobs, section),
)
