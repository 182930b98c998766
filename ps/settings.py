"""The options of a job's server and workers: typed, and checked once, when they are constructed.

An option of the server is one field of `ServerSettings`. The command line (``python -m distkeras.ps serve``) has a flag
for each field, with the text of the docstring, and `ServerProcess` passes all fields to its child. Secrets are not
settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distkeras.ps import rules
from distkeras.ps.center.center import Center, require_rows
from distkeras.ps.center.living_tables import make_table
from distkeras.ps.center.schedulers import Scheduler, scheduler_for
from distkeras.ps.center.tables import Table
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.compression import require_format
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import Rule
from distkeras.ps.rules.schedules import Schedule, schedule_of
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.validate import check_field, check_fields, count, flag, invalid, refuse, require_integer
from distkeras.ps.world.world import REAL, World


@dataclass(frozen=True)
class ServerSettings:
    """The options of a parameter server.

    Args:
        rule: the update rule.
        workers: number of workers of the job.
        learning_rate: the server's, a number or a schedule over its clock (gradient rules).
        staleness_bound: iterations that a worker may be ahead of the slowest; None: no bound.
        measure_gap: record the gap of each commit.
        max_skipped: commits with a NaN or infinity that are skipped before a further one ends the job.
        host: address to bind.
        port: port to bind; 0: one that is free.
        deadlines: of every wait.
        checkpoint: where and how often to save the server's state; None: nowhere.
        max_body: bytes of the largest initial center that is accepted.
        tables: the tables that travel by rows, in addition to the center's vector (`Traits.rows`).
        relays: "host": the workers of each host are a group, whose movements one of them, the relay, sends as one
            commit; a number: the number of groups, in the order of the workers. None: each worker commits alone.
        lends: workers that have no work left train mini-batches of others.
        shards: servers among which the elements of the center are divided; 1: one server has all of them.
    """

    rule: Rule
    workers: int
    learning_rate: float | Schedule | None = None
    staleness_bound: int | None = count(None, 0)
    measure_gap: bool = flag(False)
    max_skipped: int = count(0, 0)
    host: str = "127.0.0.1"
    port: int = count(0, 0, 0xFFFF)
    deadlines: Deadlines = field(default_factory=Deadlines)
    checkpoint: Checkpoint | None = None
    max_body: int = count(1 << 32)
    tables: tuple[TableShape, ...] = ()
    relays: int | str | None = None
    lends: bool = flag(False)
    shards: int = count(1)

    def __post_init__(self) -> None:
        _require_kinds(self)
        check_field(self, "workers", require_integer)
        check_fields(self)
        scheduler_for(self.rule, self.workers, self.staleness_bound)
        check_field(self, "learning_rate", lambda name, value: schedule_of(value), optional=True)
        require_learning_rate(self.rule, self.learning_rate)
        if self.tables:
            check_field(self, "tables", _require_shapes)
            require_rows(self.rule, len(self.tables))
            refuse("tables by rows", self)
        if self.relays is not None:
            _require_relays(self.rule.for_workers(self.workers), self.relays)
            refuse("relays", self)
        if self.shards > 1:
            _require_shards(self.rule)
            refuse("shards", self)

    def check_store(self) -> None:
        """Check that the server can keep its files, if it has a checkpoint: see `SavePlace.check`."""
        if self.checkpoint is not None:
            self.checkpoint.check()

    def make_scheduler(self) -> Scheduler:
        """Return a new scheduler."""
        return scheduler_for(self.rule, self.workers, self.staleness_bound, gather=self.relays is not None)

    def make_center(
        self,
        vector: np.ndarray,
        moving_statistics: np.ndarray,
        incarnation: int,
        world: World = REAL,
        tables: Sequence[Table] | None = None,
        make: Callable[..., Center] = Center,
    ) -> Center:
        """Return a center with initial parameters (float32) and moving statistics; ``tables`` None: rows are zero.

        ``make``: the center's class, or a function with the same arguments.
        """
        return make(
            self.rule,
            vector,
            workers=self.workers,
            learning_rate=self.learning_rate,
            scheduler=self.make_scheduler(),
            moving_statistics=moving_statistics,
            measure_gap=self.measure_gap,
            check_finite=True,
            incarnation=incarnation,
            now=world.time,
            monotonic=world.monotonic,
            tables=[make_table(shape) for shape in self.tables] if tables is None else tables,
            lends=self.lends,
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values, which `from_json` reads."""
        return {option.name: _json_of(getattr(self, option.name)) for option in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ServerSettings:
        """Return the settings that `to_json` encoded; raise a ConfigurationError if one is invalid."""
        return cls(**{name: _FROM_JSON[name](value) if name in _FROM_JSON else value for name, value in values.items()})


@dataclass(frozen=True)
class WorkerSettings:
    """The options that every worker of a job has; they travel in Spark's own task closure.

    Args:
        rule: the update rule.
        workers: number of workers of the job.
        wire_format: the format of vectors between workers and server: "float32", "bfloat16" or "int8".
        overlap: compute the next window while a commit and its reply are in flight.
        threads: compute threads of one worker; None: the number of cores that Spark gives to a task.
        keep_optimizer: send the optimizer's state to the server at intervals, and begin with the state that it keeps.
        shared_memory: exchange vectors with a server on the same host through shared memory, if possible.
        relays: see `ServerSettings`.
        lends: see `ServerSettings`.
        shards: see `ServerSettings`.
        deadlines: of every wait.
    """

    rule: Rule
    workers: int
    wire_format: str = "float32"
    overlap: bool = flag(False)
    threads: int | None = count(None)
    keep_optimizer: bool = flag(True)
    shared_memory: bool = flag(True)
    relays: int | str | None = None
    lends: bool = flag(False)
    shards: int = count(1)
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        _require_kinds(self)
        check_field(self, "workers", require_integer)
        check_fields(self)
        # The server keeps the rule as it was given, so that a job may continue with another number of workers.
        object.__setattr__(self, "rule", self.rule.for_workers(self.workers))
        require_format(self.wire_format, self.rule)
        if self.overlap and not self.rule.traits.overlaps:
            raise ConfigurationError(
                f"`overlap` must be False: under rule {self.rule.name!r}, a worker waits for the reply to its commit. "
                "Received: overlap=True"
            )
        if self.relays is not None:
            _require_relays(self.rule, self.relays)
            refuse("relays", self)


def require_learning_rate(rule: Rule, learning_rate: float | Schedule | None) -> None:
    """Raise a ConfigurationError unless the server's learning rate is set exactly for the rules that need one."""
    if rule.traits.gradient and learning_rate is None:
        raise ConfigurationError(
            f"`learning_rate` must be given: rule {rule.name!r} takes its steps at the server. Received: None"
        )
    if learning_rate is not None and not rule.traits.gradient:
        raise ConfigurationError(
            f"`learning_rate` must be None: rule {rule.name!r} steps at the workers, so set the rate in "
            f"`worker_optimizer`. Received: learning_rate={learning_rate}"
        )


def _require_relays(rule: Rule, relays: Any) -> None:
    """Raise a ConfigurationError unless the workers of a job under ``rule`` may have ``relays``."""
    if relays != "host":
        require_integer("relays", relays)
    if not rule.traits.sums:
        names = sorted(name for name in rules.center_rules() if rules.make(name).traits.sums)
        raise ConfigurationError(
            f"`relays` must be None unless the rule adds up movements, which {', '.join(names)} can do. "
            f"Received: relays={relays!r} with rule {rule.name!r} and its hyper-parameters"
        )
    if isinstance(rule.window, str):
        raise ConfigurationError(
            "`window` must be a number or None with `relays`: its exchanges are waits for "
            f"the group's slowest worker. Received: window={rule.window!r}"
        )


def _require_shards(rule: Rule) -> None:
    """Raise a ConfigurationError unless the center of a job under ``rule`` may be divided among shards."""
    if rule.traits.peers:
        raise ConfigurationError(
            f"`shards` must be 1 under rule {rule.name!r}: its workers exchange with each other. Received: more shards"
        )


def _require_kinds(settings: ServerSettings | WorkerSettings) -> None:
    if not isinstance(settings.rule, Rule):
        raise invalid("rule", settings.rule, "a `Rule`")
    if not isinstance(settings.deadlines, Deadlines):
        raise invalid("deadlines", settings.deadlines, "`Deadlines`")


def _require_shapes(name: str, value: Any) -> tuple[TableShape, ...]:
    if not all(isinstance(shape, TableShape) for shape in value) or len({shape.name for shape in value}) < len(value):
        raise invalid(name, value, "shapes of tables, each with a name of its own")
    return tuple(value)


def _json_of(value: Any) -> Any:
    if isinstance(value, Rule):
        return {"name": value.name, "hyper_parameters": value.config()}
    if isinstance(value, Schedule):
        return value.config()
    if isinstance(value, (Deadlines, Checkpoint)):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [dataclasses.asdict(shape) for shape in value]
    return value


#: The functions that decode the fields for which JSON has no type.
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "rule": lambda value: rules.make(value["name"], **value["hyper_parameters"]),
    "deadlines": lambda value: Deadlines(**value),
    "checkpoint": lambda value: None if value is None else Checkpoint(**value),
    "tables": lambda value: tuple(TableShape(**shape) for shape in value),
}
