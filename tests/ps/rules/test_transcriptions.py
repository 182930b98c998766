"""Comparison of the simulator with numpy transcriptions of the papers, under explicit schedules, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.present import present
from support.ps import transcriptions
from support.ps.transcriptions import Problem

from distkeras.ps.rules import center_rules, make
from distkeras.ps.rules.schedules import Cosine, Schedule, StepDecay, WarmUp
from distkeras.ps.simulation.virtual_job import Trace

ETA = 0.05
COMMITS = 36  # complete rounds of 1, 3 and 4 workers

CASES = [
    ("downpour", {}),
    ("downpour", {"window": 3}),
    ("zealous_downpour", {"window": 1}),
    ("zealous_downpour", {"window": 4}),
    ("zealous_downpour", {"window": 4, "explore": True}),
    ("agn", {"window": 1}),
    ("agn", {"window": 4}),
    ("dynsgd", {"window": 1}),
    ("dynsgd", {"window": 3}),
    *[
        ("adag", {"window": 3, "form": form, "gamma": 0.02, "algorithm": algorithm, "normalize": place % 2 == 0})
        for place, (form, algorithm) in enumerate(
            itertools.product(["4.1", "4.7", "4.10", "4.1norm", "4.7norm"], [11, 12, 13])
        )
    ],
    ("adag", {"window": 1}),
    ("aeasgd", {"window": 1, "rho": 5.0}),
    ("aeasgd", {"window": 4, "rho": 2.0}),
    ("eamsgd", {"window": 1, "rho": 2.0, "momentum": 0.9}),
    ("eamsgd", {"window": 3, "rho": 5.0, "momentum": 0.5}),
    ("easgd", {"window": 1, "rho": 2.0}),
    ("easgd", {"window": 3, "rho": 2.0}),
    ("easgd", {"window": 6, "rho": 3.0, "early_stopping": "2.9"}),
    ("easgd", {"window": 6, "rho": 3.0, "early_stopping": "2.10"}),
    ("averaging", {"window": 1}),
    ("averaging", {"window": 4}),
    *[("diloco", {"window": window, "nesterov": nesterov}) for window in (1, 4) for nesterov in (True, False)],
    *[
        ("fedopt", {"window": 3, "form": form, "server_rate": 0.1, "beta_2": 0.9})
        for form in ("adam", "yogi", "adagrad", "amsgrad")
    ],
    ("delayed_nesterov", {"window": 1}),
    ("delayed_nesterov", {"window": 3, "period": 1}),
    ("delayed_nesterov", {"window": 2, "period": 5, "activation": 0.6}),
    ("delayed_nesterov", {"window": 2, "momentum": 0.5, "activation": 1.0}),
    ("mla", {"window": 1}),
    ("mla", {"window": 3, "momentum": 0.5, "reach": 1.0}),
    ("delay_adaptive", {}),
    ("delay_adaptive", {"window": 3, "threshold": 1}),
    ("fedbuff", {"window": 1}),
    ("fedbuff", {"window": 3, "buffer": 2, "exponent": 1.0, "server_rate": 0.7}),
    ("fedbuff", {"window": 2, "buffer": 5, "momentum": 0.5}),
    ("fedbuff", {"window": 2, "momentum": 0.9, "nesterov": True, "exponent": 0.0}),
    ("fadas", {"window": 1}),
    ("fadas", {"window": 2, "buffer": 2, "server_rate": 0.1, "epsilon": 1e-3}),
    ("fadas", {"window": 2, "buffer": 1, "server_rate": 0.1, "delay_threshold": 2, "beta_2": 0.5}),
    ("fadas", {"window": 1, "buffer": 2, "server_rate": 0.1, "delay_threshold": None}),
    ("ringmaster", {}),
    ("ringmaster", {"window": 3, "threshold": 1}),
    ("ringmaster", {"window": 2, "threshold": 2, "patience": 2}),
    ("ringmaster", {"threshold": 2, "patience": 0}),
    ("ringmaster", {"threshold": 3, "patience": None}),
    ("ssgd", {}),
    ("asgd", {}),
    *[
        (name, {"momentum": momentum})
        for name, momentum in itertools.product(
            [
                "ssgdm",
                "ssgdm_local",
                "asgdm",
                "shifted_momentum",
                "ormo",
                "smega2",
                "nag_asgd",
                "lwp",
                "multi_asgd",
                "dana_zero",
                "dana_slim",
            ],
            [0.0, 0.9],
        )
    ],
    *[("dana_dc", {"momentum": m, "compensation": c}) for m, c in [(0.9, 2.0), (0.5, 0.3), (0.0, 1.0)]],
    *[
        ("dc_asgd", {"adaptive": adaptive, "momentum": momentum, **more})
        for (adaptive, more), momentum in itertools.product(
            [(False, {}), (False, {"compensation": 1.0}), (True, {"compensation": 0.3, "decay": 0.6})], [0.0, 0.8]
        )
    ],
]
GRADIENT = [case for case in CASES if center_rules()[case[0]]().traits.gradient]
RATES = [
    StepDecay(ETA, boundaries=(5, 14, 15), factor=0.5),
    WarmUp(ETA, length=12, divisor=4, boundaries=(20,)),
    Cosine(ETA, length=30, least=0.01),
]


def label(value: str | dict[str, Any]) -> str | None:
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None


def random_schedule(rng: np.random.Generator, n: int, rounds: bool) -> list[int]:
    """Return complete rounds in random order, or else a random sequence with some workers faster than others."""
    if rounds:
        return np.concatenate([rng.permutation(n) for _ in range(COMMITS // n)]).tolist()
    return rng.choice(n, COMMITS, p=rng.dirichlet(np.ones(n))).tolist()


def check(
    name: str, hyper: dict[str, Any], n: int, seed: int, *, eta: Schedule | float = ETA, weight_decay: float = 0.0
) -> Trace:
    rule = make(name, **hyper, **({"weight_decay": weight_decay} if weight_decay else {}))
    rounds = rule.traits.synchronous
    schedule = random_schedule(np.random.default_rng(seed), n, rounds)
    expected = getattr(transcriptions, name)(
        Problem(n, schedule, eta=eta, weight_decay=weight_decay, seed=seed), **hyper
    )
    expected = np.array(list(expected))
    trace = Problem(n, schedule, seed=seed).simulated(rule, learning_rate=eta)
    centers = present(present(trace.centers)[n - 1 :: n] if rounds else trace.centers)
    assert centers.dtype == np.float64
    assert np.isfinite(expected).all()
    assert np.abs(centers - expected).max() <= 1e-12 * np.abs(expected).max()
    return trace


@pytest.mark.parametrize("name", center_rules())
def test_every_rule_has_a_transcription_and_a_case(name: str) -> None:
    assert callable(getattr(transcriptions, name))
    assert name in {case for case, _ in CASES}


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=label)
def test_the_simulator_equals_the_papers_formulas(name: str, hyper: dict[str, Any]) -> None:
    for n, seed in itertools.product((1, 3, 4), range(2)):
        check(name, hyper, n, seed)


@pytest.mark.parametrize(("name", "hyper"), GRADIENT, ids=label)
def test_the_simulator_equals_the_formulas_under_learning_rate_schedules_and_with_weight_decay(
    name: str, hyper: dict[str, float]
) -> None:
    # The rules whose momentum contains eta rescale it when eta changes; the other rules need not.
    for eta in RATES:
        check(name, hyper, 3, seed=7, eta=eta)
    check(name, hyper, 4, seed=8, weight_decay=0.1)


@pytest.mark.parametrize("explore", [False, True])
def test_the_compared_cases_contain_zealous_windows_of_all_lengths(explore: bool) -> None:
    assert set(check("zealous_downpour", {"window": 4, "explore": explore}, 4, seed=0).steps) == {1, 2, 3, 4}


@pytest.mark.parametrize("condition", ["2.9", "2.10"])
def test_the_compared_cases_contain_windows_with_and_without_early_stopping(condition: str) -> None:
    # Without both kinds, the comparison above would not test early stopping.
    trace = check("easgd", {"window": 6, "rho": 3.0, "early_stopping": condition}, 4, seed=0)
    assert set(trace.steps) - {6}
    assert len(set(trace.steps)) > 1
