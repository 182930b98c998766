"""The trials of a search that continue; in these tests, the training is a function of setting and epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkeras import SuccessiveHalving
from distkeras.ps.errors import ConfigurationError, LocalProtocolError, NonFiniteError

#: The epochs of each rung, and the settings that are trained for as many epochs.
Rungs = list[tuple[int, list[Any]]]


def run(search: SuccessiveHalving, value: Callable[[Any, int], float]) -> Rungs:
    rungs = []
    for rung in search:
        rungs.append((rung[0].epochs, [trial.setting for trial in rung]))
        assert {trial.epochs for trial in rung} == {rung[0].epochs}
        for trial in reversed(rung):
            trial.report(value(trial.setting, trial.epochs))
    return rungs


def test_each_rung_has_half_of_the_trials_and_twice_the_epochs() -> None:
    search = SuccessiveHalving([5, 1, 7, 3, 0, 2, 6, 4], 16, first_epochs=2, factor=2, mode="min")
    assert run(search, lambda setting, epochs: setting) == [
        (2, [5, 1, 7, 3, 0, 2, 6, 4]),
        (4, [1, 3, 0, 2]),
        (8, [1, 0]),
        (16, [0]),
    ]
    assert (search.best.setting, search.best.number, search.best.value) == (0, 4, 0)
    assert search.best.values == {2: 0, 4: 0, 8: 0, 16: 0}


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (8, {"epochs": 16, "first_epochs": 2}, [(2, 8), (8, 2), (16, 1)]),
        (9, {"epochs": 10, "factor": 3}, [(1, 9), (3, 3), (10, 1)]),  # a single trial trains for all epochs at once
        (9, {"epochs": 2, "factor": 3}, [(1, 9), (2, 3)]),
        (3, {"epochs": 4, "first_epochs": 4}, [(4, 3)]),
        (1, {"epochs": 4}, [(1, 1), (4, 1)]),
    ],
)
def test_rungs_have_these_epochs_and_numbers_of_trials(
    count: int, options: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    search = SuccessiveHalving(range(count), mode="max", **options)
    rungs = run(search, lambda setting, epochs: setting)
    assert [(epochs, len(settings)) for epochs, settings in rungs] == expected
    assert search.best.setting == count - 1


def test_only_the_values_of_the_last_rung_decide() -> None:
    late = {0: {1: 9.0, 2: 1.0}, 1: {1: 8.0, 2: 3.0}, 2: {1: 7.0, 2: 2.0}, 3: {1: 0.0}}
    search = SuccessiveHalving(range(4), 2, factor=2, mode="max")
    assert run(search, lambda setting, epochs: late[setting][epochs]) == [(1, [0, 1, 2, 3]), (2, [0, 1])]
    assert [trial.setting for trial in search.ranking] == [1, 0]


@pytest.mark.parametrize(
    ("values", "survivors"),
    [
        ([1, 1, 1, 0], [0, 1, 2]),  # the three are equal
        ([2, 1, 1, 0], [0, 1, 2]),
        ([2, 0, 0, 0], [0]),  # the other trials are equally bad
        ([2, 1, 0, 0], [0, 1]),
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([2, math.nan, math.nan, 1], [0, 3]),
        ([2, math.nan, math.inf, math.nan], [0]),
    ],
)
def test_tied_trials_continue_together_and_failed_ones_do_not(values: list[float], survivors: list[int]) -> None:
    search = SuccessiveHalving(range(4), 2, factor=2, mode="max")
    rungs = run(search, lambda setting, epochs: values[setting])
    assert rungs[1] == (2, survivors)


VALUES = st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 4, math.nan]), min_size=1, max_size=9), min_size=4, max_size=4)


def outcome(table: Sequence[Sequence[float]], order: Sequence[int], mode: str) -> list[tuple[int, set[int]]] | str:
    """Return the rungs of a search whose values are ``table[rung][setting % its length]``, as sets."""
    search = SuccessiveHalving(order, 8, factor=2, mode=mode)
    rows = dict(zip((1, 2, 4, 8), table, strict=True))
    try:
        rungs = run(search, lambda setting, epochs: rows[epochs][setting % len(rows[epochs])])
    except NonFiniteError:
        return "failed"
    return [(epochs, set(settings)) for epochs, settings in rungs]


@given(VALUES, st.permutations(range(7)), st.sampled_from(["min", "max"]))
def test_the_order_of_the_settings_does_not_matter(table: list[list[float]], order: list[int], mode: str) -> None:
    rungs = outcome(table, order, mode)
    assert rungs == outcome(table, range(7), mode)
    if isinstance(rungs, str):
        return
    rows, sign = dict(zip((1, 2, 4, 8), table, strict=True)), 1 if mode == "min" else -1
    for (epochs, trials), (_, survivors) in pairwise(rungs):
        values = {setting: sign * rows[epochs][setting % len(rows[epochs])] for setting in trials}
        dropped = [values[setting] for setting in trials - survivors if not math.isnan(values[setting])]
        kept = [values[setting] for setting in survivors]
        assert kept
        assert max(kept) < min(dropped, default=math.inf)  # so no dropped trial equals one that continues
        if len(kept) < len(trials) // 2:  # the other trials have failed or are equally bad
            assert len(set(dropped)) <= 1


class TestErrors:
    def test_a_trial_without_a_report_is_an_error(self) -> None:
        rungs = iter(search := SuccessiveHalving("abc", 4, factor=2, mode="min"))
        first, _, third = next(rungs)
        with pytest.raises(LocalProtocolError, match="none has ended"):
            _ = search.best
        assert math.isnan(first.value)
        first.report(1.0)
        third.report(0.0)
        with pytest.raises(LocalProtocolError, match=r"no value of trials \[1\] after 1 epochs"):
            next(rungs)

    def test_a_search_whose_trials_all_fail_is_an_error(self) -> None:
        search = SuccessiveHalving("ab", 4, mode="min")
        with pytest.raises(NonFiniteError, match=r"no trial has a finite value after 1 epochs: \{0: nan, 1: nan\}"):
            run(search, lambda setting, epochs: math.nan)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("settings", {"settings": []}),
            ("epochs", {"epochs": 0}),
            ("first_epochs", {"first_epochs": 5}),
            ("factor", {"factor": 1}),
            ("mode", {"mode": "auto"}),
        ],
    )
    def test_invalid_arguments_are_refused(self, name: str, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=f"`{name}` must"):
            SuccessiveHalving(**{"settings": [1], "epochs": 4, "mode": "min", **options})

    def test_a_value_that_is_not_a_number_is_refused(self) -> None:
        (trial,) = next(iter(SuccessiveHalving([1], 4, mode="min")))
        with pytest.raises(ConfigurationError, match="`value` must be a number"):
            trial.report(None)  # type: ignore[arg-type]  # the test passes a wrong type
