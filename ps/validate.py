"""Checks of arguments, and of the options that a capability of a job excludes.

Every error says what was expected and what was received.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distkeras.ps.errors import ConfigurationError


def invalid(name: str, value: Any, expected: str, **where: Any) -> ConfigurationError:
    """Return the error for a bad argument; ``expected`` follows "must be", ``where`` are keywords of the error."""
    return ConfigurationError(f"`{name}` must be {expected}. Received: {name}={value!r}", **where)


def require_integer(name: str, value: Any, low: int = 1, high: int | None = None) -> int:
    """Return an integer (no boolean) from ``low`` to ``high`` as an ``int``, or raise ConfigurationError."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
    if high is not None:
        raise invalid(name, value, f"an integer from {low} to {high}")
    raise invalid(name, value, "a positive integer" if low == 1 else f"an integer of at least {low}")


def require_number(
    name: str,
    value: Any,
    low: float = 0.0,
    *,
    inclusive: bool = False,
    below: float = math.inf,
    up_to: float = math.inf,
) -> float:
    """Return a finite number above ``low`` (or equal if ``inclusive``), below ``below`` and at most ``up_to``."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            finite = math.isfinite(number)
        except OverflowError:  # an integer above the largest float
            finite = False
        if finite and number < below and number <= up_to and (number > low or (number == low and inclusive)):
            return number
    bounds = [
        f"{words} {bound:g}"
        for words, bound in (("of at least" if inclusive else "above", low), ("below", below), ("at most", up_to))
        if math.isfinite(bound)
    ]
    raise invalid(name, value, f"a finite number {' and '.join(bounds)}".rstrip())


def require_boolean(name: str, value: Any) -> bool:
    """Return a boolean of Python or numpy as a ``bool``; raise a ConfigurationError for other values, even for 1."""
    if not isinstance(value, bool | np.bool_):
        raise invalid(name, value, "True or False")
    return bool(value)


def require_text(name: str, value: Any, expected: str) -> str:
    """Return a string that is not empty; raise a ConfigurationError, in which ``expected`` follows "must be"."""
    if not isinstance(value, str) or not value:
        raise invalid(name, value, expected)
    return value


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return the value; raise a ConfigurationError unless it is one of ``choices``."""
    if not isinstance(value, Hashable) or value not in choices:  # comparing an array returns an array
        raise invalid(name, value, f"one of {', '.join(map(repr, choices))}")
    return value


def check_field(
    holder: object, name: str, check: Callable[..., Any], *bounds: Any, optional: bool = False, **options: Any
) -> None:
    """Set the field ``name`` of a frozen dataclass to what ``check(name, value, …)`` returns, or to None."""
    value = getattr(holder, name)
    if value is not None or not optional:
        object.__setattr__(holder, name, check(name, value, *bounds, **options))


def checked(default: Any, check: Callable[..., Any], *bounds: Any, **options: Any) -> Any:
    """Return a dataclass field that `check_fields` checks; see `check_field` for the arguments."""
    return dataclasses.field(default=default, metadata={"check": (check, bounds, options)})


def check_fields(holder: Any) -> None:
    """Call `check_field` for every field that `checked` has made; it is optional if its annotation ends in None."""
    for field in dataclasses.fields(holder):
        if "check" in field.metadata:
            check, bounds, options = field.metadata["check"]
            check_field(holder, field.name, check, *bounds, optional=str(field.type).endswith("None"), **options)


def count(default: int | None, low: int = 1, high: int | None = None) -> Any:
    """Return a field for an integer from ``low`` to ``high``."""
    return checked(default, require_integer, low, high)


def positive(default: float | None) -> Any:
    """Return a field for a finite number above 0."""
    return checked(default, require_number)


def not_negative(default: float | None) -> Any:
    """Return a field for a finite number of at least 0."""
    return checked(default, require_number, inclusive=True)


def fraction(default: float) -> Any:
    """Return a field for a number in [0, 1)."""
    return checked(default, require_number, inclusive=True, below=1)


def flag(default: bool | None) -> Any:
    """Return a field for True or False."""
    return checked(default, require_boolean)


def choice(default: Any, *choices: Any) -> Any:
    """Return a field for one of ``choices``."""
    return checked(default, require_choice, choices)


class Exclusion(NamedTuple):
    """An option that a capability excludes, unless it has one of the values ``allowed``."""

    option: str
    allowed: tuple[Any, ...]
    why: str


_UNENCRYPTED = "connections between workers are authenticated, and not encrypted"

#: By capability. Options are fields of the settings of server, workers and training; "stream" is whether there is one.
EXCLUSIONS = {
    "relays": (
        Exclusion("staleness_bound", (None,), "a group advances together"),
        Exclusion("overlap", (False,), "the workers of a group wait for its slowest one"),
        Exclusion("wire_format", ("float32",), "a sum is of what workers sent"),
        Exclusion("tls", (False,), _UNENCRYPTED),
        Exclusion("stream", (False,), "the workers of a micro-batch begin one by one"),
    ),
    "a rule whose workers exchange": (
        Exclusion("server", ("driver",), "a server that moves is not supported"),
        Exclusion("max_skipped", (0,), "what one worker skips is in the parameters of all"),
        Exclusion("tls", (False,), _UNENCRYPTED),
        Exclusion("stream", (False,), "the steps of an epoch must be known before the first one"),
    ),
    "lending": (
        Exclusion("staleness_bound", (None,), "a worker that helps has no place among them"),
        Exclusion("relays", (None,), "a relay sends what the workers of its host did on their own partitions"),
        Exclusion("tls", (False,), _UNENCRYPTED),
        Exclusion("stream", (False,), "Spark begins the next micro-batch when the tasks of this one have ended"),
    ),
    "tables by rows": (
        Exclusion("wire_format", ("float32",), "rows travel as float32"),
        Exclusion("overlap", (False,), "the next window's rows come with the reply for which it does not wait"),
        Exclusion("measure_gap", (False,), "a gap is of whole vectors"),
        Exclusion("relays", (None,), "relays add up whole vectors"),
        Exclusion("frozen_weights", (None,), "the model is sent without these weights"),
    ),
    "shards": (
        Exclusion("measure_gap", (False,), "a gap is of whole vectors"),
        Exclusion("relays", (None,), "relays send whole vectors to one server"),
    ),
    "a stream": (
        Exclusion("partitioned_already", (False,), "its micro-batches are spread over the workers"),
        Exclusion("server", ("driver",), "the driver receives its micro-batches"),
    ),
}


def reason_against(capability: str, *settings: object, **options: Any) -> str | None:
    """Return the first reason why a job with these options cannot have ``capability``; None if it can.

    ``settings`` are objects whose attributes are options. What is neither there nor in ``options`` is not looked at.
    """
    given: Mapping[str, Any] = {name: value for one in settings for name, value in vars(one).items()} | options
    for option, allowed, why in EXCLUSIONS[capability]:
        if option in given and given[option] not in allowed:
            if option == "stream":
                return f"`df` must not be a stream with {capability}: {why}. Received: a stream"
            values = " or ".join(map(repr, allowed))
            return f"`{option}` must be {values} with {capability}: {why}. Received: {option}={given[option]!r}"
    return None


def refuse(capability: str, *settings: object, **options: Any) -> None:
    """Raise ConfigurationError if a job with these options cannot have ``capability``; see `reason_against`."""
    reason = reason_against(capability, *settings, **options)
    if reason is not None:
        raise ConfigurationError(reason)
