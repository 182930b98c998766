"""`Checkpoint`: where and how often a job is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError


@pytest.mark.parametrize("bad", [{"every": 0}, {"keep": 0}, {"every": 1.5}])
def test_bad_numbers_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive integer"):
        Checkpoint("folder", **bad)


@pytest.mark.parametrize("bad", ["", 5, None, b"folder"])
def test_a_value_that_is_not_a_directory_or_a_uri_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^`uri` must be a directory, or a URI"):
        Checkpoint(bad)


def test_a_path_is_accepted_as_a_directory() -> None:
    assert Checkpoint(cast(Any, Path("some") / "folder")).uri == str(Path("some", "folder").absolute())
