"""The rows of versions: all rows at first, then changes, which applied in order are the whole table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.ps.saved_tables import add

from distkeras.keras_model.published_rows import PublishedRows, published_rows
from distkeras.keras_model.stored_rows import listed_files, load_rows, save_rows
from distkeras.layers import WideEmbedding
from distkeras.ps.center.living_tables import LivingTable
from distkeras.ps.errors import ConfigurationError, SnapshotError
from distkeras.ps.protocol.driver_messages import ChangesBegun
from distkeras.ps.protocol.tables import TableShape, initial_rows
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.files import apart

SHAPE = TableShape("table", 500, 2, 500, seed=4, scale=0.5, expire_commits=30)


class Direct:
    """Reads a table without a server, as a driver's client does; ``broken`` breaks the next read in its middle."""

    def __init__(self, table: LivingTable) -> None:
        self.table, self.clock, self.broken = table, 0, False

    def begin_changes(self, since: int) -> ChangesBegun:
        return ChangesBegun(self.clock, self.table.begin_changes(since, self.clock))

    def touched(self, number: int, shape: TableShape) -> Iterator[Any]:
        yield self.table.present(slice(0, self.table.count))
        self._break()

    def changes(self, number: int, shape: TableShape) -> Iterator[Any]:
        for start in range(0, self.table.marks.count, 50):
            yield self.table.changed(slice(start, min(start + 50, self.table.marks.count)))
            self._break()

    def _break(self) -> None:
        if self.broken:
            self.broken = False
            raise OSError("the disk is full")


class Stream:
    """Commits of random rows to a table, whose versions are published in a folder."""

    def __init__(self, folder: Path) -> None:
        self.uri, self.table = str(folder), LivingTable(SHAPE)
        self.direct, self.rng = Direct(self.table), np.random.default_rng(3)
        self.published = PublishedRows(self.uri, [(0, SHAPE)])
        #: What the headers of the versions have, and the rows that a reader must find.
        self.headers: list[dict[str, Any]] = []
        self.expected: list[dict[int, list[float]]] = []

    def train(self, commits: int, below: int = 500) -> None:
        for _ in range(commits):
            ids = np.unique(self.rng.integers(0, below, 8))
            self.direct.clock += 1
            self.table.apply(ids, self.rng.random(2 * len(ids), np.float32), add, self.direct.clock)
            self.table.tick(self.direct.clock, 0.0)

    def publish(self) -> dict[str, Any]:
        before = self.headers[-1] if self.headers else {}
        header = self.published.write(cast(DriverClient, self.direct), len(self.headers), before)
        self.headers.append(header)
        ids = np.flatnonzero(self.table.is_live(np.arange(SHAPE.rows)))
        rows = self.table.gather(ids).reshape(-1, 2).tolist()
        self.expected.append(dict(zip(ids.tolist(), rows, strict=True)))
        return header

    def entries(self, number: int) -> list[dict[str, Any]]:
        return listed_files(published_rows(self.uri, self.headers[number], "table"), SHAPE)


def rows_in(uri: str, header: dict[str, Any]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for ids, rows in load_rows(published_rows(uri, header, "table"), SHAPE):
        assert not found.keys() & set(ids.tolist())
        found |= dict(zip(ids.tolist(), rows.tolist(), strict=True))
    return found


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    """Return a stream with twelve versions, two of which have all rows."""
    stream = Stream(tmp_path)
    stream.train(60)
    for _ in range(12):
        stream.train(4, below=300)
        stream.publish()
    return stream


def test_each_version_has_the_rows_that_are_live(stream: Stream) -> None:
    for header, expected in zip(stream.headers, stream.expected, strict=True):
        assert rows_in(stream.uri, header) == expected


def test_a_version_writes_the_changes_until_they_are_half_of_the_rows(stream: Stream) -> None:
    whole = [number for number in range(12) if not any(entry.get("change") for entry in stream.entries(number))]
    assert whole[0] == 0
    assert 2 <= len(whole) <= 6
    for number in set(range(12)) - set(whole):
        before, entries = stream.entries(number - 1), stream.entries(number)
        assert entries[: len(before)] == before
        assert 0 < sum(entry["rows"] for entry in entries[len(before) :]) < 80  # of 250
        assert all(entry.get("change") for entry in entries[len(before) :])
    assert any(entry.get("gone") for entry in stream.entries(11))


def test_the_place_of_a_list_keeps_the_query_of_a_uri() -> None:
    uri = "s3://bucket/versions?endpoint_override=host"
    place, _ = published_rows(uri, {"lists": {"table": ["rows-1.json", "0"]}}, "table")
    assert apart(place) == ("s3://bucket/versions/rows?endpoint_override=host", "rows-1.json")


def test_rows_without_checksums_are_read_again(tmp_path: Path) -> None:
    """Rows that an earlier version of this package wrote have no list, and equal names in each folder."""
    layer = WideEmbedding(9, 2, "unused", scale=0.5, seed=4, name="table")
    for number in (1, 2):
        saved = save_rows(str(tmp_path), [(np.array([3]), np.full((1, 2), number, np.float32))])
        (Path(saved.folder) / "_rows.json").unlink()
        layer.rows, layer.rows_checksum = saved.folder, None
        assert layer.open_rows().take(np.array([3])).tolist() == [[number, number]]


def test_a_layer_that_follows_versions_has_the_rows_of_each(stream: Stream) -> None:
    layer = WideEmbedding(SHAPE.rows, 2, "unused", scale=0.5, seed=4, name="table")
    every = np.arange(SHAPE.rows)
    for number in (0, 1, 2, 5, 6, 3, 4, 11):
        layer.rows, layer.rows_checksum = published_rows(stream.uri, stream.headers[number], "table")
        expected = initial_rows(SHAPE, every)
        for row, vector in stream.expected[number].items():
            expected[row] = vector
        np.testing.assert_array_equal(layer.open_rows().take(every), expected)


def test_a_version_that_could_not_be_written_is_written_again(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.train(20)
    stream.publish()
    stream.train(3)
    stream.direct.broken = True
    with pytest.raises(SnapshotError, match="the disk is full"):
        stream.publish()
    stream.train(3)  # as if the micro-batch had come again
    assert rows_in(stream.uri, stream.publish()) == stream.expected[-1]


def test_only_the_files_of_kept_versions_stay(stream: Stream) -> None:
    kept = [3, 10, 11]
    stream.published.prune(11, [stream.headers[number] for number in kept])
    for number in kept:
        assert rows_in(stream.uri, stream.headers[number]) == stream.expected[number]
    needed = {entry["name"] for number in kept for entry in stream.entries(number)}
    lists = {stream.headers[number]["lists"]["table"][0] for number in kept}
    assert {path.name for path in (Path(stream.uri) / "rows").iterdir()} == needed | lists


def test_a_damaged_file_of_changes_is_an_error(stream: Stream) -> None:
    name = stream.entries(2)[-1]["name"]
    path = Path(stream.uri) / "rows" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigurationError, match=r"the rows of table 'table' must be in .*with other bytes"):
        rows_in(stream.uri, stream.headers[2])
