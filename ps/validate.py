"""Checks of arguments, with one way to say what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distkeras.ps.errors import ConfigurationError


def invalid(name: str, value: Any, expected: str) -> ConfigurationError:
    """The error that every rule gives for a bad hyper-parameter."""
    return ConfigurationError(f"`{name}` must be {expected}. Received: {name}={value!r}")


def require_number(name: str, value: Any, low: float = 0.0, *, inclusive: bool = False) -> None:
    """A finite number above ``low`` (or equal to it, where ``inclusive``)."""
    if type(value) not in (int, float) or not math.isfinite(value) or value < low or (value == low and not inclusive):
        raise invalid(name, value, f"a finite number {'of at least' if inclusive else 'above'} {low:g}")


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """One of ``choices``."""
    if value not in choices:
        raise invalid(name, value, f"one of {', '.join(map(repr, choices))}")
