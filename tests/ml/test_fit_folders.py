"""The checkpoint folders of the fits of one estimator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from distkeras import Checkpoint
from distkeras.ml import estimator
from distkeras.ml.estimator import folder_of_fit
from distkeras.ps.errors import ConfigurationError


@pytest.fixture(autouse=True)
def no_earlier_fits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
    return str(Path(found.uri).relative_to(Path.cwd()))


def test_each_fit_has_its_own_folder() -> None:
    assert [place(), place(), place("another estimator"), place(checkpoint="elsewhere/")] == [
        "folder", "folder-2", "folder", "elsewhere",
    ]  # fmt: skip
    assert place(checkpoint="elsewhere/") == "elsewhere-2"
    with folder_of_fit("both", "folder", False) as one, folder_of_fit("both", "folder", False) as other:
        assert (one, other) == (Checkpoint("folder"), Checkpoint("folder-2"))


def test_the_other_settings_of_a_checkpoint_are_kept() -> None:
    checkpoint = Checkpoint("folder", every=7, keep=2)
    with folder_of_fit("one", checkpoint, False) as first, folder_of_fit("one", checkpoint, False) as second:
        assert (first, second) == (checkpoint, Checkpoint("folder-2", every=7, keep=2))


def test_the_next_fit_reuses_the_folder_of_a_failed_fit() -> None:
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


def test_a_fit_without_a_checkpoint_has_no_folder() -> None:
    with folder_of_fit("one", None, False) as found:
        assert found is None
    with pytest.raises(ConfigurationError, match="`resume` needs a `checkpoint` to resume from"):
        place(checkpoint=None, resume=True)
