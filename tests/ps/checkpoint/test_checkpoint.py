"""Where and how often a job is saved, as a caller says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError


@pytest.mark.parametrize("bad", [{"every": 0}, {"keep": 0}, {"every": 1.5}])
def test_bad_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive integer"):
        Checkpoint("folder", **bad)


@pytest.mark.parametrize("bad", ["", 5, None, b"folder"])
def test_what_is_no_place(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^`uri` must be a directory, or a URI"):
        Checkpoint(bad)


def test_a_path_is_a_place() -> None:
    assert Checkpoint(cast(Any, Path("some") / "folder")).uri == str(Path("some") / "folder")
