"""What runs have drawn, compared with all that there is: options, messages, states, rules, faults and streams' phases.

An option that is added to the server's settings, a message, or a field of a lease shows up here as something that no
run has ever tried, until the generator draws it (`plan.py`) or `EXCEPTIONS` says why not.
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
from distkeras.ps.protocol.messages import MESSAGES
from distkeras.ps.rules import Rule, center_rules
from distkeras.ps.rules.base import Traits
from distkeras.ps.rules.schedules import KINDS as SCHEDULES
from distkeras.ps.server.start import StartRequest
from distkeras.ps.settings import ServerSettings, WorkerSettings
from simulation import watch, worker
from simulation.command import collecting
from simulation.plan import KINDS, PHASES, Plan, draw
from simulation.scheduler import Finding
from simulation.simulation import simulate

#: What no run tries, and why not.
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
    "PartitionLease.passed": "it is shown to people, and nothing else depends on it: `ps/server/test_server.py`",
}


class Row(NamedTuple):
    """One thing that there is.

    Args:
        name: what it is.
        wanted: how many values it must take, or 1 for what must be there.
        seen: the values that it took, the first few of them.
        values: how many there were.
    """

    name: str
    wanted: int
    seen: tuple[str, ...]
    values: int

    @property
    def verdict(self) -> str:
        """What is to be said of it; "": nothing."""
        excuse = EXCEPTIONS.get(self.name)
        if self.values < self.wanted:
            return "" if excuse else f"{self.name} must take {self.wanted} values. Received: {list(self.seen)}"
        return f"{self.name} is drawn, and needs no exception" if excuse else ""


class Census:
    """What was seen in runs; `findings` are the promises that broke, by seed."""

    def __init__(self) -> None:
        self.findings: dict[int, Finding] = {}
        self._seen: dict[str, dict[str, None]] = {}
        self._leases: set[tuple[str, object]] = set()

    def see(self, name: str, value: object) -> None:
        """Notes a value."""
        values = self._seen.setdefault(name, {})
        if len(values) < _MOST_VALUES:
            values[value if isinstance(value, str) else repr(value)] = None

    def see_fields(self, of: Any) -> None:
        """Notes the value of each field of a dataclass."""
        for field in dataclasses.fields(of):
            value = getattr(of, field.name)
            self.see(f"{type(of).__name__}.{field.name}", str(value) if isinstance(value, Rule) else value)

    def see_request(self, request: StartRequest) -> None:
        """Notes what a server is asked to be."""
        settings = request.settings
        for of in (request, settings, request.mode, settings.checkpoint, settings.rule.traits):
            if of is not None:
                self.see_fields(of)
        self.see(f"rule {settings.rule.name}", settings.rule)
        self.see(f"family {settings.rule.info.family}", settings.rule.name)
        if settings.learning_rate is not None:
            self.see(f"schedule {json.loads(request.to_json())['settings']['learning_rate']['schedule']}", "there")

    def see_lease(self, lease: PartitionLease) -> None:
        """Notes the state of a lease: numbers as far as they are none, few or many."""
        for field, name in _LEASE_FIELDS:
            value = getattr(lease, field)
            known = value if value is None or isinstance(value, (bool, LeaseState)) else _kind_of(field, value)
            if (name, known) not in self._leases:
                self._leases.add((name, known))
                self.see(name, known)

    def rows(self, plans: Iterable[Plan] = ()) -> list[Row]:
        """All that there is, with what was seen of it; ``plans`` are draws that need not have been run."""
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


#: Values of one thing that are kept.
_MOST_VALUES = 20
#: Each field of a lease, and what it is called in a row.
_LEASE_FIELDS = [(field.name, f"PartitionLease.{field.name}") for field in dataclasses.fields(PartitionLease)]


def _kind_of(name: str, value: Any) -> str:
    if name == "attempt":
        return "nobody" if value == NO_ATTEMPT else "an attempt"
    if isinstance(value, (int, float)):
        return "none" if value <= 0 else "some"
    return "there" if value else "empty"


def _everything() -> Iterator[tuple[str, int]]:
    """The name of each thing that there is, and how many values it must take."""
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
    """Runs ``seeds``; returns what was seen."""
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
    """Has ``census`` see what is asked for, sent and held."""
    encode, look, from_json = framing.encode, watch.Watch.look_at, StartRequest.from_json

    def encoded(message: Any, *arguments: Any) -> Any:
        census.see(f"message {type(message).__name__}", "sent")
        return encode(message, *arguments)

    def told(*arguments: Any, **options: Any) -> WorkerSettings:
        made = WorkerSettings(*arguments, **options)
        census.see_fields(made)
        census.see(f"wire format {made.wire_format}", "agreed")
        return made

    def looked_at(self: watch.Watch, child: Any, center: Any) -> None:
        census.see(f"pace {type(center.scheduler).__name__}", "there")
        for lease in center.leases.values():
            census.see_lease(lease)
        look(self, child, center)

    def asked(text: str) -> StartRequest:
        request = from_json(text)
        census.see_request(request)
        return request

    with ExitStack() as stack:
        for owner, name, replacement in (
            (framing, "encode", encoded),
            (worker, "WorkerSettings", told),
            (watch.Watch, "look_at", looked_at),
            (StartRequest, "from_json", asked),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
