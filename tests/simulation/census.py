"""A census of what runs have drawn among all options, messages, states, rules, faults and phases of streams.

A new option of the server's settings, a new message, or a new field of a lease is reported here as untested until the
generator draws it (`plan.py`) or `EXCEPTIONS` gives a reason.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from distkeras.ps.center.leases import NO_ATTEMPT, LeaseState, PartitionLease
from distkeras.ps.center.schedulers import Scheduler
from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.protocol import framing
from distkeras.ps.protocol.compression import FORMATS
from distkeras.ps.protocol.registry import MESSAGES
from distkeras.ps.rules import Rule, center_rules
from distkeras.ps.rules.base import Traits
from distkeras.ps.rules.schedules import KINDS as SCHEDULES
from distkeras.ps.server.process import StartRequest
from distkeras.ps.settings import ServerSettings, WorkerSettings
from simulation import attempt, watch
from simulation.command import collecting
from simulation.plan import KINDS, PHASES, Plan, draw
from simulation.scheduler import Finding
from simulation.simulation import simulate

#: Items that no run draws, with the reason.
EXCEPTIONS = {
    "ServerSettings.max_body": "it bounds what strangers make a server hold: `tests/ps/server/test_hostile.py`",
    "ServerSettings.deadlines": "time is a number here, so only their proportions matter, which are the real ones",
    "WorkerSettings.deadlines": "they are the server's",
    "WorkerSettings.threads": "nothing is computed here",
    "WorkerSettings.shared_memory": "which workers share memory with the server is drawn: `Plan.neighbors`",
    "StartMode.same_attempts": "drivers never ask for it; in a job's own snapshot it always holds",
    "StartRequest.job": "another job's snapshots are refused before anything else happens: `training/test_resume.py`",
    "Checkpoint.uri": "a run has one checkpoint",
    "PartitionLease.active_at": "it is a time, and always there",
    "Plan.deadlines": "as the settings' own",
    "message AddUp": "few jobs with shards have a rule with a norm over all elements: `tests/ps/shards`",
    "message Total": "as above",
    "message AskRole": "no job has shards in the cluster: `tests/ps/shards/test_shard_task.py`",
    "message Role": "it answers `AskRole`",
    "message ShardFault": "a center that is not finite needs numbers that overflow: `tests/ps/shards`",
}


class Row(NamedTuple):
    """One item of the census.

    Args:
        name: the item's name.
        wanted: the number of values that it must take, or 1 if it must only occur.
        seen: the first few values that it took.
        values: the number of values that it took.
    """

    name: str
    wanted: int
    seen: tuple[str, ...]
    values: int

    @property
    def verdict(self) -> str:
        """Return the problem of this item, or "" if there is none."""
        excuse = EXCEPTIONS.get(self.name)
        if self.values < self.wanted:
            return "" if excuse else f"{self.name} must take {self.wanted} values. Received: {list(self.seen)}"
        return f"{self.name} is drawn, and needs no exception" if excuse else ""


class Census:
    """The observations of runs; `findings` are the broken promises, by seed."""

    def __init__(self) -> None:
        self.findings: dict[int, Finding] = {}
        self._seen: dict[str, dict[str, None]] = {}
        self._leases: set[tuple[str, object]] = set()

    def see(self, name: str, value: object) -> None:
        """Record a value."""
        values = self._seen.setdefault(name, {})
        if len(values) < _MOST_VALUES:
            values[value if isinstance(value, str) else repr(value)] = None

    def see_fields(self, of: Any) -> None:
        """Record the value of each field of a dataclass."""
        for field in dataclasses.fields(of):
            value = getattr(of, field.name)
            self.see(f"{type(of).__name__}.{field.name}", str(value) if isinstance(value, Rule) else value)

    def see_request(self, request: StartRequest) -> None:
        """Record the options of a server's start request."""
        settings = request.settings
        for of in (request, settings, request.mode, settings.checkpoint, settings.rule.traits):
            if of is not None:
                self.see_fields(of)
        self.see(f"rule {settings.rule.name}", settings.rule)
        self.see(f"family {settings.rule.info.family}", settings.rule.name)
        if settings.learning_rate is not None:
            self.see(f"schedule {json.loads(request.to_json())['settings']['learning_rate']['schedule']}", "there")

    def see_lease(self, lease: PartitionLease) -> None:
        """Record the state of a lease; numbers are recorded as none, few or many."""
        for field, name in _LEASE_FIELDS:
            value = getattr(lease, field)
            known = value if value is None or isinstance(value, (bool, LeaseState)) else _kind_of(field, value)
            if (name, known) not in self._leases:
                self._leases.add((name, known))
                self.see(name, known)

    def rows(self, plans: Iterable[Plan] = ()) -> list[Row]:
        """Return all items with their observed values; ``plans`` are draws that need not have been run."""
        for plan in plans:
            self.see_fields(plan)
            self.see(f"rule {plan.rule}", "drawn")
            self.see_fields(plan.make_rule().traits)
            for fault in plan.faults:
                self.see(f"faults at phase {fault.scope}", fault.kind)
        return [self._row(name, wanted) for name, wanted in _everything()]

    def _row(self, name: str, wanted: int) -> Row:
        values = list(self._seen.get(name, ()))
        return Row(name, wanted, tuple(values[:3]), len(values))


#: The number of values of one item that are kept.
_MOST_VALUES = 20
#: Each field of a lease, and its name in a row.
_LEASE_FIELDS = [(field.name, f"PartitionLease.{field.name}") for field in dataclasses.fields(PartitionLease)]


def _kind_of(name: str, value: Any) -> str:
    if name == "attempt":
        return "no attempt" if value == NO_ATTEMPT else "an attempt"
    if isinstance(value, (int, float)):
        return "none" if value <= 0 else "some"
    return "there" if value else "empty"


def _everything() -> Iterator[tuple[str, int]]:
    """Yield the name of each item, and how many values it must take."""
    for kind in (ServerSettings, WorkerSettings, Checkpoint, StartMode, StartRequest, Traits, PartitionLease, Plan):
        for field in dataclasses.fields(kind):
            yield f"{kind.__name__}.{field.name}", 2
    for message in MESSAGES:
        yield f"message {message.__name__}", 1
    paces: list[type[Scheduler]] = [Scheduler, *Scheduler.__subclasses__()]
    for pace in paces:
        yield f"pace {pace.__name__}", 1
    for name, rule in center_rules().items():
        yield f"rule {name}", 1
        yield f"family {rule.info.family}", 1
    for phase, kinds in PHASES.items():
        yield f"faults at phase {phase}", len(kinds)
    for prefix, names in (("wire format", FORMATS), ("schedule", SCHEDULES), ("fault", KINDS), ("phase", PHASES)):
        yield from ((f"{prefix} {name}", 1) for name in names)


def take_census(seeds: range) -> Census:
    """Run ``seeds``, and return the census."""
    census = Census()
    with _seen_by(census):
        for seed in collecting(seeds):
            outcome = simulate(draw(seed))
            if outcome.finding is not None:
                census.findings[seed] = outcome.finding
            for fault in outcome.injected:
                census.see(f"fault {fault.kind}", "struck")
            for phase in outcome.phases:
                census.see(f"phase {phase}", "passed")
    return census


@contextmanager
def _seen_by(census: Census) -> Iterator[None]:
    """Make ``census`` observe the start requests, messages, settings and leases of runs."""
    encode, look, from_json = framing.encode, watch.Watch.look_at, StartRequest.from_json

    def encode_and_observe(message: Any, *arguments: Any) -> Any:
        census.see(f"message {type(message).__name__}", "sent")
        return encode(message, *arguments)

    def make_settings(*arguments: Any, **options: Any) -> WorkerSettings:
        made = WorkerSettings(*arguments, **options)
        census.see_fields(made)
        census.see(f"wire format {made.wire_format}", "agreed")
        return made

    def check_and_observe(self: watch.Watch, child: Any, center: Any) -> None:
        census.see(f"pace {type(center.scheduler).__name__}", "there")
        for lease in center.leases.values():
            census.see_lease(lease)
        look(self, child, center)

    def parse_and_observe(text: str) -> StartRequest:
        request = from_json(text)
        census.see_request(request)
        return request

    with ExitStack() as stack:
        for owner, name, replacement in (
            (framing, "encode", encode_and_observe),
            (attempt, "WorkerSettings", make_settings),
            (watch.Watch, "look_at", check_and_observe),
            (StartRequest, "from_json", parse_and_observe),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
