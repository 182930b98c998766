"""The options of a job's server and workers: typed, and checked once, where they are built.

An option of the server is one field of `ServerSettings`, and the code that acts on it: the command line
(``python -m distkeras.ps serve``) has a flag for each field, with the text that the docstring has for it, and
`ServerProcess` hands all fields to its child. Secrets are no settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distkeras.ps import rules
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.compression import require_format
from distkeras.ps.rules import Rule
from distkeras.ps.rules.schedules import Schedule, schedule_of
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.validate import invalid, require_boolean, require_integer


@dataclass(frozen=True)
class ServerSettings:
    """The options of a parameter server.

    Args:
        rule: the update rule.
        workers: number of workers of the job.
        learning_rate: the server's, a number or a schedule over its clock (gradient rules).
        staleness_bound: iterations that a worker may be ahead of the slowest; None: no bound.
        measure_gap: record the gap of each commit.
        max_skipped: commits with a NaN or infinity that are left out before one of them ends the job.
        host: address to bind.
        port: port to bind; 0: one that is free.
        deadlines: of every wait.
        checkpoint: where and how often to save the server's state; None: nowhere.
        max_body: bytes of the largest initial center that is taken.
        authenticate_vectors: without TLS, tags also cover the long vectors of commits and of the center.

    Raises:
        ConfigurationError: one of them cannot work.
    """

    rule: Rule
    workers: int
    learning_rate: float | Schedule | None = None
    staleness_bound: int | None = None
    measure_gap: bool = False
    max_skipped: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    deadlines: Deadlines = field(default_factory=Deadlines)
    checkpoint: Checkpoint | None = None
    max_body: int = 1 << 32
    authenticate_vectors: bool = False

    def __post_init__(self) -> None:
        _require_rule(self.rule)
        _replace(self, "workers", require_integer("workers", self.workers))
        _replace(self, "max_skipped", require_integer("max_skipped", self.max_skipped, 0))
        _replace(self, "port", require_integer("port", self.port, 0, 0xFFFF))
        _replace(self, "max_body", require_integer("max_body", self.max_body))
        for name in ("measure_gap", "authenticate_vectors"):
            _replace(self, name, require_boolean(name, getattr(self, name)))
        _require_deadlines(self.deadlines)
        if self.staleness_bound is not None:
            _replace(self, "staleness_bound", require_integer("staleness_bound", self.staleness_bound, 0))
        scheduler_for(self.rule, self.workers, self.staleness_bound)
        if self.learning_rate is not None:
            _replace(self, "learning_rate", schedule_of(self.learning_rate))
        require_learning_rate(self.rule, self.learning_rate)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; `from_json` takes it back."""
        return {option.name: _json_of(getattr(self, option.name)) for option in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ServerSettings:
        """The settings that `to_json` gave.

        Raises:
            ConfigurationError: one of them cannot work.
        """
        return cls(**{name: _FROM_JSON.get(name, _as_it_is)(value) for name, value in values.items()})


@dataclass(frozen=True)
class WorkerSettings:
    """The options that every worker of a job has; they travel in Spark's own task closure.

    Args:
        rule: the update rule.
        workers: number of workers of the job.
        wire_format: what vectors look like between workers and server: "float32", "bfloat16" or "int8".
        overlap: compute the next window while a commit and its reply travel.
        threads: compute threads of one worker; None: as many as Spark gives cores to a task.
        deadlines: of every wait.

    Raises:
        ConfigurationError: one of them cannot work.
    """

    rule: Rule
    workers: int
    wire_format: str = "float32"
    overlap: bool = False
    threads: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        _require_rule(self.rule)
        _replace(self, "workers", require_integer("workers", self.workers))
        require_format(self.wire_format, self.rule)
        _replace(self, "overlap", require_boolean("overlap", self.overlap))
        _require_deadlines(self.deadlines)
        if self.overlap and not self.rule.traits.overlaps:
            raise ConfigurationError(
                f"`overlap` is for rules that go on while a commit travels; {self.rule.name!r} does not. "
                "Received: overlap=True"
            )
        if self.threads is not None:
            _replace(self, "threads", require_integer("threads", self.threads))


def require_learning_rate(rule: Rule, learning_rate: float | Schedule | None) -> None:
    """Check that the server's learning rate is set for the rules that need one, and for no other.

    Raises:
        ConfigurationError: it is not so.
    """
    if rule.traits.gradient and learning_rate is None:
        raise ConfigurationError(
            f"`learning_rate` must be given: rule {rule.name!r} takes its steps at the server. Received: None"
        )
    if learning_rate is not None and not rule.traits.gradient:
        raise ConfigurationError(
            f"`learning_rate` is the server's, for gradient rules; rule {rule.name!r} steps at the workers: "
            f"set it in `worker_optimizer`. Received: learning_rate={learning_rate}"
        )


def _require_rule(rule: Rule) -> None:
    if not isinstance(rule, Rule):
        raise invalid("rule", rule, "a `Rule`")


def _require_deadlines(deadlines: Deadlines) -> None:
    if not isinstance(deadlines, Deadlines):
        raise invalid("deadlines", deadlines, "`Deadlines`")


def _replace(settings: ServerSettings | WorkerSettings, name: str, value: Any) -> None:
    """Sets a field of frozen settings while they are built: a value as Python has it, in place of numpy's."""
    object.__setattr__(settings, name, value)


def _json_of(value: Any) -> Any:
    if isinstance(value, Rule):
        return {"name": value.name, "hyper_parameters": value.config()}
    if isinstance(value, Schedule):
        return value.config()
    if isinstance(value, (Deadlines, Checkpoint)):
        return dataclasses.asdict(value)
    return value


def _as_it_is(value: Any) -> Any:
    return value


#: How the fields that JSON cannot hold as they are come back.
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "rule": lambda value: rules.make(value["name"], **value["hyper_parameters"]),
    "deadlines": lambda value: Deadlines(**value),
    "checkpoint": lambda value: None if value is None else Checkpoint(**value),
}
