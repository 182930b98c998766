"""The files of trained groups in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distkeras.groups.pieces import (
    CHECKSUM,
    WEIGHTS,
    Manifest,
    Pieces,
    TrainedGroup,
    folder,
    packed_weights,
    piece_name,
    piece_schema,
    unpacked_weights,
)
from distkeras.ps.errors import SnapshotError

SCHEMA = piece_schema(pa.schema([("shop", pa.string()), ("year", pa.int32())]))


def trained(shop: str | None, year: int, rows: int = 3) -> TrainedGroup:
    return TrainedGroup((shop, year), rows, 0.5, 0.25, (("accuracy", 1.0),), checksum=2**64 - rows, weights=b"1234")


def test_a_piece_is_saved_and_loaded(tmp_path: Path) -> None:
    pieces = Pieces(str(tmp_path), SCHEMA)
    failed = TrainedGroup((None, 2), 1, 0.1, error="BadValueError: null")
    name = piece_name(7, "ab", 1, 0)
    pieces.write(name, [trained("a", 1), failed])
    table = pieces.table(name, ["rows", "loss", "metrics", "error", CHECKSUM, WEIGHTS])
    assert list(pieces.keys(table)) == [("a", 1), (None, 2)]
    assert table["loss"].to_pylist() == [0.25, None]
    assert table["metrics"].to_pylist() == [[("accuracy", 1.0)], None]
    assert table["error"].to_pylist() == [None, "BadValueError: null"]
    assert table[WEIGHTS].to_pylist() == [b"1234", None]
    assert pieces.finished(7) == ([name], {("a", 1): (3, 2**64 - 3), (None, 2): (1, 0)})
    assert pieces.finished(8) == ([], {})


def test_the_first_of_two_pieces_with_one_key_counts(tmp_path: Path) -> None:
    pieces = Pieces(str(tmp_path), SCHEMA)
    first, other, third = (piece_name(0, "ab", attempt, 0) for attempt in (1, 2, 3))
    pieces.write(first, [trained("a", 1), trained("b", 1)])
    pieces.write(other, [trained("b", 1), trained("c", 1)])
    pieces.write(third, [trained("d", 1)])
    names, keys = pieces.finished(0)
    assert names == [first, third]
    assert set(keys) == {("a", 1), ("b", 1), ("d", 1)}


def test_an_incomplete_piece_does_not_count(tmp_path: Path) -> None:
    pieces = Pieces(str(tmp_path), SCHEMA)
    name = piece_name(0, "ab", 1, 0)
    pieces.write(name, [trained("a", 1)])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / f"{piece_name(0, 'ab', 1, 1)}.draft").write_bytes(whole[:50])
    (tmp_path / "groups.json").write_text("{}")
    assert pieces.names(0) == [name]
    (tmp_path / name).write_bytes(whole[:50])
    with pytest.raises(SnapshotError, match=name):
        pieces.finished(0)


def test_a_manifest_is_saved_and_loaded(tmp_path: Path) -> None:
    files = folder(str(tmp_path))
    assert Manifest.load(files) is None
    for manifest in (Manifest({"seed": 1}, ("shop",)), Manifest({"seed": 1}, ("shop", "year"), ("piece",))):
        manifest.save(files)
        assert Manifest.load(files) == manifest


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="`path` must be a folder"):
        folder(str(tmp_path / "file"))


@given(
    st.lists(hnp.arrays(st.sampled_from([np.float32, np.int64, np.uint8]), hnp.array_shapes(min_dims=0)), max_size=4)
)
def test_weights_are_saved_and_loaded_to_the_bit(arrays: list[np.ndarray]) -> None:
    back = unpacked_weights(packed_weights(arrays), [(array.shape, array.dtype) for array in arrays])
    assert [(array.dtype, array.shape, array.tobytes()) for array in back] == [
        (array.dtype, array.shape, array.tobytes()) for array in arrays
    ]
