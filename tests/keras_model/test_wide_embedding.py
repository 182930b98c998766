"""A layer whose table no process holds completely: its replacement at a worker, and its predictions."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import layers
from support.training.table_models import CutCase

from distkeras.keras_model.archive import from_bytes, to_bytes
from distkeras.keras_model.stored_rows import (
    in_unnamed_file,
    load_rows,
    require_folder,
    save_rows,
    sorted_files,
    sorted_rows,
)
from distkeras.layers import WideEmbedding
from distkeras.ps.errors import BadValueError, ConfigurationError, ServerLostError
from distkeras.ps.protocol.tables import TableShape, initial_rows

ROWS, WIDTH = 2**62, 3


def wide(folder: Any = "/nowhere", count: int = ROWS, **options: Any) -> WideEmbedding:
    return WideEmbedding(count, WIDTH, str(folder), scale=0.5, seed=4, name="table", **options)


def compiled(model: keras.Model, optimizer: Any = None) -> keras.Model:
    model.compile(optimizer or keras.optimizers.SGD(0.5), "mse")
    return model


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((4,), dtype="int64"), wide(), layers.Flatten(), layers.Dense(1)])


def dot() -> keras.Model:
    """Return a factorization, which has no other weights."""
    user, item = (keras.Input((1,), dtype="int64", name=name) for name in ("user", "item"))
    table = wide()
    return keras.Model([user, item], layers.Dot(1)([layers.Flatten()(table(ids)) for ids in (user, item)]))


def with_an_ordinary_table() -> keras.Model:
    ids = keras.Input((4,), dtype="int64")
    parts = [wide()(ids), layers.Embedding(3000, 2, name="other")(ids % 3000)]
    return keras.Model(ids, layers.Dense(1)(layers.Concatenate()([layers.Flatten()(part) for part in parts])))


travels = pytest.mark.skipif(keras.backend.backend() == "torch", reason="tables stay dense on PyTorch")


@travels
@pytest.mark.parametrize("model", [sequential, dot, with_an_ordinary_table])
def test_a_worker_has_a_small_embedding_in_its_place(model: Callable[[], keras.Model]) -> None:
    case = CutCase.of(compiled(model()))
    (number, shape), *others = case.cut.partial
    assert not others
    assert shape == TableShape("table", ROWS, WIDTH, shape.most, 4, 0.5)
    assert number == len(case.cut.tables) - 1  # the tables that the driver holds are first
    small = case.small().model.get_layer("table")
    assert type(small) is layers.Embedding
    assert (small.input_dim, small.output_dim) == (shape.most, WIDTH)


@travels
def test_the_error_for_a_wide_table_that_must_stay_dense_gives_the_reason() -> None:
    ids = keras.Input((4,), dtype="int64")
    within = keras.Model(ids, layers.Flatten()(keras.Sequential([keras.Input((4,), dtype="int64"), wide()])(ids)))
    frozen = sequential()
    frozen.layers[0].trainable = False
    reasons = {
        "Adam may move rows": compiled(sequential(), keras.optimizers.Adam()),
        "weight decay": compiled(sequential(), keras.optimizers.SGD(weight_decay=0.1)),
        "lies within the layer": compiled(keras.Model(ids, layers.Dense(1)(within(ids)))),
        "it does not train": compiled(frozen),
    }
    for reason, model in reasons.items():
        with pytest.raises(ConfigurationError, match=f"must travel by rows.*{reason}"):
            CutCase.of(model)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"input_dim": 0}, "input_dim"),
        ({"input_dim": 2**63}, "input_dim"),
        ({"output_dim": 0}, "output_dim"),
        ({"folder": ""}, "folder"),
        ({"scale": -1.0}, "scale"),
        ({"seed": -1}, "seed"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], name: str) -> None:
    given: dict[str, Any] = {"input_dim": 9, "output_dim": 2, "folder": "/nowhere"}
    with pytest.raises(ConfigurationError, match=f"`{name}` must be"):
        WideEmbedding(**(given | options))


def test_predictions_use_trained_and_initial_rows(tmp_path: Path) -> None:
    if keras.backend.backend() == "jax":
        pytest.skip("JAX has no int64 unless it is enabled at its start")
    trained = np.array([5, 2**60, 0])
    vectors = np.arange(9, dtype=np.float32).reshape(3, 3)
    place = save_rows(str(tmp_path), [(trained[:2], vectors[:2]), (trained[2:], vectors[2:])])
    layer = wide(tmp_path, rows=place.folder, rows_checksum=place.checksum)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    copy = from_bytes(to_bytes(model))
    ids = np.array([[5, 7], [0, 2**60]])
    expected = np.stack([[vectors[0], initial_rows(layer.table(), np.array([7]))[0]], [vectors[2], vectors[1]]])
    np.testing.assert_array_equal(copy.predict_on_batch(ids), expected)
    with pytest.raises(Exception, match=r"ids of 'table' must be in \[0, .*Received: -1"):
        copy(np.array([[-1, 0]]))
    with pytest.raises(ConfigurationError, match=r"must be trained by `distkeras\.Trainer`"):
        copy(ids, training=True)


def test_no_file_is_there_that_a_killed_process_would_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = save_rows(str(tmp_path / "saved"), [(np.array([5, 7]), np.ones((2, 3), np.float32))])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    rows = wide(tmp_path, rows=place.folder, rows_checksum=place.checksum).open_rows()
    assert not list(temporary.iterdir())
    np.testing.assert_array_equal(rows.take(np.array([7])), np.ones((1, 3), np.float32))


@hypothesis.given(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=9), st.integers(1, 4))
def test_rows_in_files_are_those_in_unnamed_ones(ids: list[int], blocks: int) -> None:
    vectors = np.arange(3 * len(ids), dtype=np.float32).reshape(-1, 3)
    parts = zip(np.array_split(np.array(ids, np.int64), blocks), np.array_split(vectors, blocks), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        saved, shape = save_rows(folder, [part for part in parts if len(part[0])]), wide(Path(folder)).table()
        in_files = [np.load(path) for path in sorted_files(saved, shape, Path(folder))]
        for array, same, expected in zip(
            sorted_rows(saved, shape, in_unnamed_file), in_files, (np.sort(ids), vectors[np.argsort(ids)]), strict=True
        ):
            assert array.dtype == same.dtype
            np.testing.assert_array_equal(array, same)
            np.testing.assert_array_equal(array, expected)


def test_rows_are_saved_in_several_files_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.keras_model.stored_rows.FILE_BYTES", 50)
    blocks = [(np.array([number, number + 100]), np.full((2, 3), number, np.float32)) for number in range(5)]
    shape = wide().table()
    place = save_rows(str(tmp_path), blocks)
    assert len(list(Path(place.folder).glob("*.parquet"))) == 2
    found = list(load_rows(place, shape))
    for part in (0, 1):
        np.testing.assert_array_equal(
            np.concatenate([block[part] for block in found]), np.concatenate([block[part] for block in blocks])
        )
    with pytest.raises(ConfigurationError, match="the rows of table 'table' must be in"):
        list(load_rows(place, TableShape("table", 9, 2, 1, 0)))
    assert list(load_rows(save_rows(str(tmp_path), []), shape)) == []


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="the `folder` of 'table' must be"):
        require_folder("table", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="must be one that the driver can write to"):
        save_rows(str(tmp_path / "file"), [(np.array([1]), np.zeros((1, 3), np.float32))])
    require_folder("table", str(tmp_path / "new"))
    assert list((tmp_path / "new").iterdir()) == []


def test_the_error_for_an_id_outside_the_table_names_it() -> None:
    with pytest.raises(BadValueError, match=r"Received: -3"):
        wide()._take(np.array([1, -3]))  # noqa: SLF001 - a backend wraps the error


@pytest.mark.parametrize(
    ("policy", "dtype"), [("float32", "float32"), ("mixed_bfloat16", "float32"), ("float32", "float16")]
)
def test_ids_that_their_dtype_rounds_are_refused(tmp_path: Path, policy: str, dtype: str) -> None:
    layer = WideEmbedding(2**24 + 1, 2, str(tmp_path), name="users", dtype=policy)
    with pytest.raises(ConfigurationError, match="ids of 'users' must be integers"):
        layer(keras.Input((1,), dtype=dtype))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # JAX makes them of 32 bits
def test_ids_that_a_backend_cuts_short_are_refused(tmp_path: Path) -> None:
    keras.Sequential([keras.Input((1,), dtype="int64"), layer := wide(tmp_path)])
    with pytest.raises(ConfigurationError, match=r"ids of 'table' must be integers of 64 bits.*Received: ids of int32"):
        layer(keras.ops.convert_to_tensor(np.array([[2**30]]), "int32"))
    if keras.backend.backend() == "jax":
        with pytest.raises(ConfigurationError, match="JAX_ENABLE_X64=1"):
            layer(np.array([[2**40]]))


def test_ids_of_a_float_input_stay_exact_in_half_precision(tmp_path: Path) -> None:
    ids = keras.Input((1,))
    layer = WideEmbedding(2**24, 2, str(tmp_path), scale=1.0, dtype="mixed_bfloat16")
    model = keras.Model(ids, layer(ids))
    low, high = model.predict_on_batch(np.array([[1000.0], [1001.0]]))
    assert (np.asarray(low) != np.asarray(high)).any()


def change_byte(place: Path) -> None:
    path = place / "rows-00000.parquet"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda place: shutil.move(place, f"{place}-moved"), "there is no folder"),
        pytest.param(lambda place: (place / "rows-00001.parquet").unlink(), "rows-00001", marks=pytest.mark.slow),
        pytest.param(
            lambda place: [path.unlink() for path in place.iterdir()], "no _rows.json", marks=pytest.mark.slow
        ),
        (change_byte, "rows-00000.parquet with other bytes"),
        (lambda place: (place / "_rows.json").write_text("[]"), "the rows of another model"),
    ],
)
def test_rows_that_are_not_those_of_the_model_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], found: str
) -> None:
    monkeypatch.setattr("distkeras.keras_model.stored_rows.FILE_BYTES", 50)
    blocks = [(np.array([number, number + 100]), np.full((2, 3), number, np.float32)) for number in range(5)]
    saved = save_rows(str(tmp_path), blocks)
    layer = wide(tmp_path, 2**30, rows=saved.folder, rows_checksum=saved.checksum)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), layer])
    np.testing.assert_array_equal(
        from_bytes(to_bytes(model)).predict(np.array([[3]]), verbose=0), np.full((1, 1, 3), 3.0)
    )
    damage(Path(saved.folder))
    copy = from_bytes(to_bytes(model))
    there = sorted(tmp_path.rglob("*"))
    for use in (copy.predict_on_batch, copy, lambda ids: copy.predict(ids, verbose=0)):
        with pytest.raises(ConfigurationError, match=f"rows of table 'table' must be in .*{found}"):
            use(np.array([[3]]))
    with pytest.raises(ConfigurationError, match=found):
        list(load_rows(saved, layer.table()))
    assert sorted(tmp_path.rglob("*")) == there  # reading makes no folder that looks like one with rows


def test_the_folder_of_rows_is_absolute_from_where_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layer = wide("rows")
    saved = save_rows(layer.folder, [(np.array([3]), np.ones((1, 3), np.float32))])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    layer.rows, layer.rows_checksum = saved
    np.testing.assert_array_equal(layer(np.array([3])), np.ones((1, 3)))
    assert Path(saved.folder).parent == tmp_path / "rows"


def test_rows_that_were_not_written_to_their_end_leave_nothing(tmp_path: Path) -> None:
    def lost() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield np.array([1]), np.zeros((1, 3), np.float32)
        raise ServerLostError("the server is lost")

    with pytest.raises(ServerLostError):
        save_rows(str(tmp_path), lost())
    assert list(tmp_path.iterdir()) == []


def test_rows_of_a_driver_that_was_killed_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.keras_model.stored_rows.FILE_BYTES", 40)
    blocks = [(np.arange(5 * number, 5 * number + 5), np.full((5, 3), number, np.float32)) for number in range(4)]
    left = tmp_path / "left"

    def written() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from blocks[:2]
        (place,) = tmp_path.iterdir()
        shutil.copytree(place, left)  # what a driver that is killed now leaves
        yield from blocks[2:]

    saved = save_rows(str(tmp_path), written())
    assert len(list(left.glob("*.parquet"))) == 2
    layer = wide(tmp_path, rows=str(left))  # without a checksum, as rows of an earlier version
    with pytest.raises(ConfigurationError, match=r"rows of table 'table' must be in .*not written to their end"):
        layer(np.array([3]))
    assert sum(len(ids) for ids, _ in load_rows(saved, layer.table())) == 20


def test_a_layer_keeps_how_its_rows_come_and_go() -> None:
    assert not {"admit_after", "expire_after_commits", "expire_after_seconds"} & wide().get_config().keys()
    given: dict[str, Any] = {"admit_after": 2, "expire_after_commits": 1, "expire_after_seconds": 60.0}
    again = WideEmbedding.from_config(wide(**given).get_config())
    assert again.table() == TableShape("table", ROWS, WIDTH, 1, 4, 0.5, 2, 1, 60.0)
    for name in given:
        with pytest.raises(ConfigurationError, match=f"`{name}` must be"):
            wide(**{name: 0})
