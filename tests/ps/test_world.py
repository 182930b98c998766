"""The real world: random numbers, child processes, paths and URIs."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.patience import patience

from distkeras.groups.store import GroupFolder, Manifest
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.checkpoint.versions import VersionFolder, Versions
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.world.files import absolute, below, beside
from distkeras.ps.world.processes import ChildProcess
from distkeras.ps.world.world import REAL


def test_random_pauses_do_not_change_the_users_random_state() -> None:
    random.seed(5)
    state = random.getstate()
    assert all(1.0 <= REAL.uniform(1.0, 2.0) <= 2.0 for _ in range(100))
    assert random.getstate() == state


def test_wait_sees_the_exit_while_other_threads_poll_the_exit_status() -> None:
    # `subprocess` lets one thread at a time collect the status; a second thread gets None while the first one does so.
    for _ in range(30):
        child = ChildProcess([sys.executable, "-I", "-S", "-c", "input()"], os.environ)

        def poll(child: ChildProcess = child) -> None:
            while child.exit_code is None:
                pass

        threads = [threading.Thread(target=poll) for _ in range(3)]
        for thread in threads:
            thread.start()
        child.kill()
        exited = child.wait(patience(10))
        for thread in threads:
            thread.join(patience(10))
        child.end_input(b"")
        child.close()
        assert exited
        assert child.exit_code == -9


ODD = "a b ü+#%20[{?*:é'"


def test_a_path_is_absolute_from_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = [Checkpoint(ODD), Versions(ODD)]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert [place.uri for place in places] == 2 * [str(tmp_path / ODD)]


#: A name as a user may give it, in one or two parts, each of which some reader of URIs would take for something else.
_NAMES = st.lists(st.text("ab ü+#%[]{}?*:&='~", min_size=1, max_size=8), min_size=1, max_size=2).map("/".join)


class _Wanderer:
    """A process that uses the folders which it was given under a relative name, and moves to another directory."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name, self.number = home, name, 0
        os.chdir(home)
        self.checkpoint, self.versions = Checkpoint(name), Versions(f"{name}-versions")
        self.groups = absolute(f"{name}-groups")

    def move(self) -> None:
        """Move to a new directory, in which there is nothing."""
        self.number += 1
        (self.home / f"elsewhere-{self.number}").mkdir()
        os.chdir(self.home / f"elsewhere-{self.number}")

    def save(self) -> None:
        """Save a snapshot, as a server that was started now."""
        SnapshotDirectory(below(self.checkpoint.uri, "center"), job={"a": 1}).take_over()

    def publish(self) -> None:
        """Publish a version, as a driver that was started now."""
        self.number += 1
        folder = VersionFolder(self.versions.uri, create=True)
        folder.take({"layout": []}, lambda: b"archive")
        folder.publish("stream", self.number, np.ones(2, np.float32), np.empty(0, np.float32))

    def train(self) -> None:
        """Begin the job of groups, or resume it."""
        manifest = Manifest({"num_epoch": 1}, "{}", hashlib.sha256(b"model").hexdigest())
        GroupFolder(self.groups).begin(manifest, b"model", resume=Path(self.groups).is_dir())


@examples(60)
@given(_NAMES, st.lists(st.sampled_from(["move", "save", "publish", "train"]), max_size=8))
def test_a_process_that_changes_its_directory_uses_the_folders_that_it_was_given(name: str, acts: list[str]) -> None:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as home:
        try:
            wanderer = _Wanderer(Path(home), name)
            for act in acts:
                getattr(wanderer, act)()
        finally:
            os.chdir(before)
        elsewhere = [path for path in Path(home).glob("elsewhere-*") if any(path.iterdir())]
        assert elsewhere == []
        due = {"save": Path(name, "center"), "publish": Path(f"{name}-versions"), "train": Path(f"{name}-groups")}
        for act, folder in due.items():
            assert (Path(home) / folder).is_dir() == (act in acts), folder
        if "publish" in acts:
            assert len(VersionFolder(str(Path(home, f"{name}-versions"))).versions()) == acts.count("publish")


@pytest.mark.parametrize("as_uri", [False, True])
def test_odd_names_are_the_folders_that_they_say(tmp_path: Path, as_uri: bool) -> None:
    place = (tmp_path / ODD).as_uri() if as_uri else str(tmp_path / ODD)
    Store(below(Checkpoint(place).uri, "center")).save("one", {}, {})
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.dks")] == [Path(ODD, "center", "one.dks")]


def test_a_name_comes_before_the_options_of_a_file_system() -> None:
    assert below("s3://bucket/a/?region=eu-west-1", "center") == "s3://bucket/a/center?region=eu-west-1"
    assert beside("s3://bucket/a?region=eu-west-1", "-2") == "s3://bucket/a-2?region=eu-west-1"
    assert (below("/a?b/", "center"), beside("/a?b", "-2")) == ("/a?b/center", "/a?b-2")


@pytest.mark.parametrize(
    ("place", "text"),
    [("file:///a#b", "'%23' in place of '#'"), ("s3://a/b#c", "'%23'"), ("file:///a?b", "'%3F'"), ("a\0b", "NUL")],
)
def test_a_place_of_which_a_part_would_be_ignored_is_refused(place: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{text}.*Received"):
        absolute(place)
