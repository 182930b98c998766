"""Where the fits of one estimator are saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from distkeras import Checkpoint
from distkeras.ml import estimator
from distkeras.ml.estimator import folder_of_fit
from distkeras.ps.errors import ConfigurationError


@pytest.fixture(autouse=True)
def nobody_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fits: dict[tuple[str, str], dict[int, bool]] = {}
    monkeypatch.setattr(estimator, "_TAKEN", fits)
    yield
    assert not any(running for taken in fits.values() for running in taken.values())


def place(uid: str = "one", checkpoint: Any = "folder", *, resume: bool = False, fails: bool = False) -> str:
    with ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(OSError, match="no room"))
        found = stack.enter_context(folder_of_fit(uid, checkpoint, resume))
        assert found is not None
        if fails:
            raise OSError("no room")
    return found.uri


def test_each_fit_has_a_folder_of_its_own() -> None:
    assert [place(), place(), place("another estimator"), place(checkpoint="elsewhere/")] == [
        "folder", "folder-2", "folder", "elsewhere/",
    ]  # fmt: skip
    assert place(checkpoint="elsewhere/") == "elsewhere-2"
    with folder_of_fit("both", "folder", False) as one, folder_of_fit("both", "folder", False) as other:
        assert (one and one.uri, other and other.uri) == ("folder", "folder-2")


def test_all_else_of_a_checkpoint_stays() -> None:
    told = Checkpoint("folder", every=7, keep=2)
    with folder_of_fit("one", told, False) as first, folder_of_fit("one", told, False) as second:
        assert (first, second) == (told, Checkpoint("folder-2", every=7, keep=2))


def test_a_fit_that_failed_leaves_its_folder_to_the_next_one() -> None:
    assert place(fails=True) == "folder"
    assert place(resume=True) == "folder"
    assert place(fails=True) == "folder-2"
    assert place() == "folder-2"


def test_only_one_fit_at_a_time_may_resume() -> None:
    assert place() == place(resume=True) == "folder"
    with (
        folder_of_fit("one", "folder", True),
        pytest.raises(ConfigurationError, match="`resume` must not be used for several fits"),
    ):
        place(resume=True)
    assert place() == "folder-2"


def test_no_checkpoint() -> None:
    with folder_of_fit("one", None, False) as found:
        assert found is None
    with pytest.raises(ConfigurationError, match="`resume` needs a `checkpoint` to resume from"):
        place(checkpoint=None, resume=True)
