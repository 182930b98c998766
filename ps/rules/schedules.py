"""Learning rates of the server, as functions of its clock (commits applied so far).

Frozen dataclasses of plain numbers, so that they travel to the server's process as JSON. Worker-side rules take
Keras' own schedules instead.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import (
    check_field,
    check_fields,
    checked,
    count,
    invalid,
    not_negative,
    positive,
    require_integer,
    require_number,
)


@dataclass(frozen=True)
class Schedule(ABC):
    """A learning rate for each tick of the clock.

    Args:
        rate: the full learning rate, above 0.
    """

    name: ClassVar[str]

    rate: float

    def __post_init__(self) -> None:
        check_field(self, "rate", require_number)
        check_fields(self)

    @abstractmethod
    def __call__(self, clock: int) -> float:
        """Return the learning rate, at least 0, of a commit at ``clock``."""

    def config(self) -> dict[str, Any]:
        """Return a description in JSON's types, from which `schedule_of` makes the schedule again."""
        return {"schedule": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rate throughout."""

    name = "constant"

    def __call__(self, clock: int) -> float:
        return self.rate


def _require_clocks(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return rising clocks as a tuple; JSON has lists."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise invalid(name, values, "a list of rising clocks")
    clocks = tuple(require_integer(name, value, 0) for value in values)
    if list(clocks) != sorted(set(clocks)):
        raise invalid(name, values, "rising clocks")
    return clocks


@dataclass(frozen=True)
class StepDecay(Schedule):
    """A rate that is multiplied by ``factor`` at each boundary.

    Args:
        boundaries: clocks, in ascending order.
        factor: factor at each boundary, above 0. Default 0.1.
    """

    name = "step"

    boundaries: tuple[int, ...] = checked((), _require_clocks)
    factor: float = positive(0.1)

    def __call__(self, clock: int) -> float:
        return self.rate * self.factor ** sum(clock >= boundary for boundary in self.boundaries)


@dataclass(frozen=True)
class WarmUp(StepDecay):
    """A rate that rises linearly from ``rate / divisor`` to ``rate`` over ``length`` commits; then step decay.

    Args:
        length: commits, at least 1.
        divisor: the number of workers in the paper, at least 1.
        boundaries, factor: see `StepDecay`.

    Reference: Hakimi et al. 2019, appendix: from eta / N to eta over the first five epochs.
    """

    name = "warm_up"

    length: int = count(1)
    divisor: float = checked(1.0, require_number, 1.0, inclusive=True)

    def __call__(self, clock: int) -> float:
        start = 1 / self.divisor
        return super().__call__(clock) * (start + (1 - start) * min(1.0, clock / self.length))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from ``rate`` down to ``least`` over ``length`` commits, then ``least``.

    Args:
        length: commits, at least 1.
        least: the final rate, at least 0 and at most ``rate``. Default 0.
    """

    name = "cosine"

    length: int = count(1)
    least: float = not_negative(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.rate:
            raise invalid("least", self.least, f"at most the rate, {self.rate:g}")

    def __call__(self, clock: int) -> float:
        part = min(1.0, clock / self.length)
        return self.least + (self.rate - self.least) * (1 + math.cos(math.pi * part)) / 2


#: The schedules by name.
KINDS: dict[str, type[Schedule]] = {kind.name: kind for kind in (Constant, StepDecay, WarmUp, Cosine)}


def schedule_of(value: float | Schedule | dict[str, Any]) -> Schedule:
    """Return the schedule of a number (a constant rate) or a `Schedule.config`; raise ConfigurationError for others."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, dict):
        arguments = dict(value)
        kind = KINDS.get(str(arguments.pop("schedule", "")))
        if kind is None or not {"rate"} <= set(arguments) <= {field.name for field in dataclasses.fields(kind)}:
            raise ConfigurationError(
                f"`learning_rate` must be a number or a schedule of {', '.join(KINDS)}. Received: {value}"
            )
        return kind(**arguments)
    return Constant(require_number("learning_rate", value))
