"""Cases of a test, of which only some run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

from support.present import present


def rest_slow(names: Iterable[str], *default: str) -> list[Any]:
    """Return the parameters of a test: all names, of which those that are not in ``default`` are slow."""
    cases = list(names)
    assert set(default) <= set(cases), default
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in cases]


def scaled_down(many: int) -> int:
    """Return ``many``, or fewer in the default suite, as `--hypothesis-profile` says."""
    return max(1, many * present(hypothesis.settings.default).max_examples // 100)


def examples(many: int) -> hypothesis.settings:
    """Return the settings of a test that draws ``many`` examples, and fewer in the default suite."""
    return hypothesis.settings(max_examples=scaled_down(many))
