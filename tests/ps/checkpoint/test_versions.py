"""Versions of a model in a directory: each is written once, held while it is used, and deleted after that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.ps.clocks import HandWorld
from support.ps.watched_files import WatchedFiles

from distkeras.ps.checkpoint.ownership import owner_of
from distkeras.ps.checkpoint.snapshots import saved_job
from distkeras.ps.checkpoint.versions import HELD_SECONDS, Version, VersionFolder, Versions, model_key
from distkeras.ps.errors import ConfigurationError, DifferentJobError, NoVersionError, SnapshotError
from distkeras.ps.world.world import World

IDENTITY = {"model": {"layers": 1}, "layout": [["kernel", [2]]]}
NOTHING = np.empty(0, np.float32)


def weights(number: int) -> np.ndarray:
    return np.full(2, number, np.float32)


def folder_at(path: Path, world: World | None = None) -> VersionFolder:
    folder = VersionFolder(str(path), world or World(), create=True)
    folder.take(IDENTITY, lambda: b"archive")
    return folder


def publish(folder: VersionFolder, number: int) -> Version:
    return folder.publish("stream", number, weights(number), NOTHING)


def numbers(folder: VersionFolder) -> list[int]:
    return [version.number for version in folder.versions()]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_reading_makes_no_folder(tmp_path: Path, scheme: str) -> None:
    uri = f"{scheme}{tmp_path}/above/versions"
    reader = VersionFolder(uri)
    with pytest.raises(NoVersionError):
        reader.latest()
    assert owner_of(uri) is None
    assert saved_job(uri) is None
    assert list(tmp_path.iterdir()) == []
    publish(folder_at(tmp_path / "above" / "versions"), 1)
    assert numbers(reader) == [1]


def test_each_version_has_the_weights_of_its_micro_batch(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    with pytest.raises(NoVersionError, match=r"must have a version of a model. Received: none after 0.2 s"):
        folder.latest(timeout=0.2)
    for number in (0, 2):
        assert publish(folder, number).number == number
    reader = VersionFolder(tmp_path.as_uri())
    assert reader.model() == (b"archive", model_key(IDENTITY))
    assert reader.latest() == reader.versions()[-1]
    for version in reader.versions():
        center, moving_statistics = reader.load(version, model_key(IDENTITY))
        np.testing.assert_array_equal(center, weights(version.number))
        assert moving_statistics.size == 0


def test_a_version_is_written_once(tmp_path: Path) -> None:
    publish(folder_at(tmp_path), 3)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    reopened = folder_at(tmp_path)  # after a crash
    assert publish(reopened, 3) == reopened.latest()
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    with pytest.raises(DifferentJobError, match=r"version 3 in .* must have the weights"):
        reopened.publish("stream", 3, weights(4), NOTHING)
    with pytest.raises(DifferentJobError, match=r"up to micro-batch 2, .* with version 3"):
        publish(reopened, 2)
    with pytest.raises(DifferentJobError, match=r"with version 3 of another stream"):
        reopened.publish("another", 4, weights(4), NOTHING)
    assert numbers(reopened) == [3]


def test_a_directory_contains_versions_of_one_model(tmp_path: Path) -> None:
    version = publish(folder_at(tmp_path), 0)
    other = {**IDENTITY, "layout": [["kernel", [3]]]}
    with pytest.raises(DifferentJobError, match=r"`layout.0.1.0` must be 2"):
        VersionFolder(str(tmp_path)).take(other, lambda: b"")
    with pytest.raises(DifferentJobError, match="must be of the model that predicts"):
        VersionFolder(str(tmp_path)).load(version, model_key(other))


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="cannot be opened"):
        VersionFolder(str(tmp_path / "file"))
    folder = folder_at(tmp_path / "folder")
    version = publish(folder, 0)
    (tmp_path / "folder" / f"{version}.dks").write_bytes(b"cut")
    with pytest.raises(SnapshotError, match="is damaged"):
        folder.load(version, model_key(IDENTITY))
    for path in (tmp_path / "folder").iterdir():
        path.unlink()
    (tmp_path / "folder").rmdir()
    with pytest.raises(SnapshotError, match="cannot be read"):
        folder.latest()


def test_the_draft_of_a_killed_publisher_is_removed(tmp_path: Path) -> None:
    version = publish(folder_at(tmp_path), 0)
    (tmp_path / f"{version._replace(number=1)}.dks.part").touch()
    assert numbers(folder_at(tmp_path)) == [0]
    assert not list(tmp_path.glob("*.part"))


def test_a_version_is_kept_while_it_is_held(tmp_path: Path) -> None:
    world = HandWorld()
    folder = folder_at(tmp_path, world)
    publish(folder, 0)
    assert folder.hold("query", 7).number == 0
    for number in range(1, 5):
        publish(folder, number)
        folder.prune(2)
    assert numbers(folder) == [0, 3, 4]
    assert folder.hold("query", 7).number == 0  # the same micro-batch again
    assert folder.hold("query", 8).number == 4
    folder.prune(2)
    assert numbers(folder) == [3, 4]
    world.now += HELD_SECONDS + 1
    publish(folder, 5)
    publish(folder, 6)
    folder.prune(2)
    assert numbers(folder) == [5, 6]
    assert not list(tmp_path.glob("reader-*"))


def test_a_mark_on_a_version_is_trusted_long_before_the_publisher_ignores_it(tmp_path: Path) -> None:
    """The publisher deletes a version whose mark is a day old; a repeated micro-batch does not begin with one."""
    world = HandWorld()
    folder = folder_at(tmp_path, world)
    publish(folder, 0)
    assert folder.hold("query", 7).number == 0
    publish(folder, 1)
    world.now += HELD_SECONDS // 2
    assert folder.hold("query", 7).number == 0
    world.now += 1
    assert folder.hold("query", 7).number == 1


def interrupted(happens: Callable[[], object]) -> World:
    """Return a world in which ``happens`` runs before each access to a file."""
    return WatchedFiles(lambda method, name: happens(), syncs=False)


class Scoring:
    """Two scoring streams, the numbers of their micro-batches, and the versions that scored them."""

    def __init__(self, folder: VersionFolder, data: st.DataObject) -> None:
        self._folder, self._data = folder, data
        self.batches = {"one": 0, "two": 0}
        self._held: dict[tuple[str, int], Version] = {}

    def score(self, folder: VersionFolder, query: str) -> None:
        self.batches[query] += self._data.draw(st.integers(0, 1), label="next micro-batch")
        batch = query, self.batches[query]
        version = folder.hold(*batch)
        assert self._held.setdefault(batch, version) == version
        self.check()

    def check(self) -> None:
        """Check that the version of each current micro-batch can be read."""
        for batch in self.batches.items():
            if batch in self._held:
                version = self._held[batch]
                center, _ = self._folder.load(version, model_key(IDENTITY))
                np.testing.assert_array_equal(center, weights(version.number))


@examples(30)
@given(data=st.data())
def test_a_held_version_can_be_read_in_any_order_of_events(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Scoring streams and the publisher interrupt each other at each access to a file."""
    path = tmp_path_factory.mktemp("versions")
    plain = folder_at(path, interrupted(lambda: None))  # without `fsync`
    scoring, due = Scoring(plain, data), iter(range(1, 1000))
    publish(plain, 0)

    def publish_some() -> None:
        for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 3]), label="versions")):
            publish(plain, next(due))
            plain.prune(2)

    def score_some() -> None:
        if data.draw(st.integers(0, 3), label="scores") == 0:
            scoring.score(plain, "two")

    scorer = VersionFolder(str(path), interrupted(publish_some))
    publisher = VersionFolder(str(path), interrupted(score_some))
    publisher._key = plain._key  # noqa: SLF001 - `take` would be interrupted too
    for action in data.draw(st.lists(st.sampled_from(["score", "publish"]), min_size=1, max_size=6), label="steps"):
        if action == "score":
            scoring.score(scorer, "one")
        else:
            publish(publisher, next(due))
            publisher.prune(2)
        scoring.check()


def test_publish_accepts_a_path_or_versions(tmp_path: Path) -> None:
    assert Versions.of("publish", None) is None
    assert Versions.of("publish", tmp_path) == Versions(str(tmp_path))
    assert Versions.of("publish", Versions(tmp_path, every=2)) == Versions(str(tmp_path), every=2)  # type: ignore[arg-type]  # as `Checkpoint`
    for wrong in (lambda: Versions.of("publish", 3), lambda: Versions.of("publish", ""), lambda: Versions("x", keep=1)):
        with pytest.raises(ConfigurationError, match="must be"):
            wrong()
