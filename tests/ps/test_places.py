"""Paths and URIs: a path keeps every character, a URI loses no part, and neither depends on a later directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.checkpoint.versions import Versions
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.world.places import absolute, below, beside

ODD = "a b ü+#%20[{?*:é'"


def test_a_path_is_absolute_from_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = [Checkpoint(ODD), Versions(ODD)]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert [place.uri for place in places] == 2 * [str(tmp_path / ODD)]


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
