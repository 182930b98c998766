"""Schedulers: when a worker may continue, and which rule uses which scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from distkeras.ps.center.schedulers import BoundedStaleness, Scheduler, Synchronous, scheduler_for
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import center_rules, make


def test_a_worker_is_ahead_by_at_most_the_bound() -> None:
    scheduler = BoundedStaleness(2, bound=1)
    for worker in (0, 1):
        scheduler.joined(worker)
    scheduler.committed(0)
    assert scheduler.ready(0)
    scheduler.committed(0)
    assert not scheduler.ready(0)
    assert scheduler.waiting_for(0) == {1}
    scheduler.committed(1)
    assert scheduler.ready(0)


def test_a_finished_worker_does_not_block_others() -> None:
    scheduler = BoundedStaleness(2, bound=0)
    for worker in (0, 1):
        scheduler.joined(worker)
    scheduler.committed(0)
    assert not scheduler.ready(0)
    scheduler.finished(1)
    assert scheduler.ready(0)


@pytest.mark.parametrize("name", center_rules())
def test_each_rule_has_the_scheduler_of_its_traits(name: str) -> None:
    traits = make(name).traits
    scheduler = scheduler_for(make(name), 3)
    assert type(scheduler) is (Synchronous if traits.synchronous else Scheduler)
    assert scheduler.gather == (traits.synchronous or traits.fixed_workers)


@pytest.mark.parametrize("name", center_rules())
def test_a_staleness_bound_is_refused_for_rules_with_rounds_and_rules_that_pull_first(name: str) -> None:
    traits = make(name).traits
    if traits.synchronous or traits.pull_first:
        with pytest.raises(ConfigurationError, match="`staleness_bound`"):
            scheduler_for(make(name), 3, 2)
    else:
        scheduler = scheduler_for(make(name), 3, 2)
        assert isinstance(scheduler, BoundedStaleness)
        assert scheduler.bound == 2


def test_a_rule_without_rounds_can_run_in_rounds() -> None:
    assert isinstance(scheduler_for(make("downpour"), 3, rounds=True), Synchronous)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("downpour", {"staleness_bound": -1}, "`staleness_bound` must be an integer of at least 0"),
        ("downpour", {"staleness_bound": 1.5}, "`staleness_bound` must be"),
        ("downpour", {"staleness_bound": 1, "rounds": True}, "either `rounds` or `staleness_bound`"),
        ("aeasgd", {"rounds": True}, "hold back the center"),
    ],
)
def test_incompatible_options_are_refused(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        scheduler_for(make(name), 3, **options)
