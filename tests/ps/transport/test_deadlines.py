"""Deadlines: an invalid value is refused where it is set."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.transport.deadlines import Deadlines


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "5", True, None])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Deadlines)])
def test_a_deadline_must_be_a_finite_number_above_zero(name: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^`{name}` must be a finite number above 0"):
        Deadlines(**{name: bad})
