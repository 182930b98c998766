from __future__ import annotations

import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.patience import patience

from distkeras.data.batches import Batch, DataSpec
from distkeras.data.columns import Column
from distkeras.data.ordering import ROW_HASH
from distkeras.data.source import BatchSource
from distkeras.ps.errors import (
    BadValueError,
    ColumnTypeError,
    ConfigurationError,
    DistkerasError,
    JobStoppedError,
    LedgerError,
    LocalProtocolError,
    MissingColumnError,
    ShapeError,
)

SECONDS = patience(20)
X, Y, W = Column("x", (2,)), Column("y", (), "int64"), Column("w")
SPEC = DataSpec(features=(X,), labels=(Y,), sample_weight=W, batch_size=4)


def records(rows: int, size: int = 5, **changed: Any) -> list[pa.RecordBatch]:
    """Return ``rows`` rows, each of which any column identifies, in record batches of ``size`` rows."""
    numbers = np.arange(rows)
    columns = {
        "y": pa.array(numbers),
        "unused": pa.array(numbers).cast(pa.string()),
        "x": pa.array([[i, i + 0.5] for i in range(rows)], pa.list_(pa.float32())),
        "w": pa.array(numbers * 2.0),
        **changed,
    }
    return pa.table({k: v for k, v in columns.items() if v is not None}).to_batches(max_chunksize=size)


def read(arrow: Iterator[Any] | list[pa.RecordBatch], spec: DataSpec = SPEC, **arguments: Any) -> list[Batch]:
    with BatchSource(iter(arrow), spec, **{"worker": 0, **arguments}) as source:
        return list(source)


@examples(40)
@given(st.integers(1, 30), st.integers(1, 3), st.booleans(), st.integers(0, 100))
def test_mini_batches_can_be_had_again_from_any_position(rows: int, epochs: int, shuffle: bool, place: int) -> None:
    spec = replace(SPEC, epochs=epochs, shuffle=shuffle, rewindable=True)
    with BatchSource(iter(records(rows, **{ROW_HASH: pa.array(np.arange(rows) * 7)})), spec, worker=3) as source:
        wanted = list(source)
        place %= len(wanted) + 1
        begin = (wanted[place].epoch, wanted[place].index) if place < len(wanted) else (epochs, 0)
        found = list(source.from_position(*begin))
    assert [(b.epoch, b.index, b.last, b.checksum) for b in found] == [
        (b.epoch, b.index, b.last, b.checksum) for b in wanted[place:]
    ]
    for own, other in zip(found, wanted[place:], strict=True):
        for one, two in zip((*own.x, *own.y, own.weight), (*other.x, *other.y, other.weight), strict=True):
            np.testing.assert_array_equal(one, two)


def contents(got: list[Batch]) -> list[tuple[Any, ...]]:
    return [(b.epoch, b.index, b.last, b.y[0].tolist()) for b in got]


def in_epochs(got: list[Batch]) -> dict[int, list[int]]:
    epochs: dict[int, list[int]] = defaultdict(list)
    for batch in got:
        epochs[batch.epoch] += batch.y[0].tolist()
    return dict(epochs)


@pytest.fixture(params=[0, 1 << 20], ids=["files", "memory"])
def spool_bytes(request: pytest.FixtureRequest) -> int:
    return request.param


specs = st.builds(
    DataSpec,
    features=st.just((X,)),
    labels=st.just((Y,)),
    sample_weight=st.sampled_from([None, W]),
    batch_size=st.integers(1, 9),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 1 << 70),
    shuffle=st.booleans(),
    spool_bytes=st.sampled_from([0, 300, 1 << 20]),
)


@examples(50)
@given(
    spec=specs,
    rows=st.integers(0, 60),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    worker=st.integers(0, 5),
    block_rows=st.sampled_from([1, 8, 20, 1000]),
    depth=st.integers(1, 5),
    data=st.data(),
)
def test_every_epoch_has_every_row_once_and_every_attempt_has_the_same_batches(
    spec: DataSpec, rows: int, sizes: tuple[int, int], worker: int, block_rows: int, depth: int, data: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distkeras.data.ordering.BLOCK_ROWS", block_rows)
        hashes = {ROW_HASH: pa.array(np.arange(rows) * 7)}
        whole = read(records(rows, sizes[0], **hashes), spec, worker=worker, depth=depth)

        per_epoch = -(-rows // spec.batch_size)
        places = [(epoch, index) for epoch in range(spec.epochs) for index in range(per_epoch)]
        assert [(b.epoch, b.index) for b in whole] == places
        for batch in whole:
            assert batch.last == (batch.index == per_epoch - 1)
            assert batch.size == (rows - batch.index * spec.batch_size if batch.last else spec.batch_size)
            # The columns of a row stay together.
            np.testing.assert_array_equal(batch.x[0], batch.y[0][:, None] + [0, 0.5])
            assert (batch.weight is None) == (spec.sample_weight is None)
            if batch.weight is not None:
                np.testing.assert_array_equal(batch.weight, batch.y[0] * 2)
        for order in in_epochs(whole).values():
            assert sorted(order) == list(range(rows))
            assert spec.shuffle or order == list(range(rows))

        # Another attempt, with other record batches and another memory budget, continues at any mini-batch.
        position = data.draw(st.integers(0, len(places)), label="resumed at")
        start = [*places, (spec.epochs, 0)][position]
        before = whole[position - 1].checksum if position else None
        other = replace(spec, spool_bytes=1000, rewindable=True)
        again = read(records(rows, sizes[1], **hashes), other, worker=worker, start=start, checksum=before, depth=depth)
        assert contents(again) == contents(whole)[position:]
        assert [b.checksum for b in again] == [b.checksum for b in whole[position:]]

        # The same source can then be moved back or forward to any other mini-batch.
        target = data.draw(st.integers(0, len(places)), label="rewound to")
        with BatchSource(
            iter(records(rows, sizes[1], **hashes)), other, worker=worker, start=start, depth=depth
        ) as source:
            deque(islice(source, data.draw(st.integers(0, len(places)), label="batches seen")), maxlen=0)
            source.rewind([*places, (spec.epochs, 0)][target], whole[target - 1].checksum if target else None)
            assert contents(list(source)) == contents(whole)[target:]
        if rows and start[1] == 0 and start[0] > 0:  # the same place as after the last mini-batch of the previous epoch
            end = (start[0] - 1, per_epoch)
            assert contents(read(records(rows), spec, worker=worker, start=end)) == contents(whole)[position:]


def test_seed_worker_and_epoch_each_change_the_order(spool_bytes: int) -> None:
    spec = replace(SPEC, epochs=3, spool_bytes=spool_bytes)
    orders = [
        tuple(order)
        for seed, worker in [(0, 0), (1, 0), (0, 1)]
        for order in in_epochs(read(records(50), replace(spec, seed=seed), worker=worker)).values()
    ]
    assert len(set(orders)) == 9


def test_memory_and_files_return_the_same_order(tmp_path: Path) -> None:
    spec = replace(SPEC, epochs=4)
    in_memory, in_files = (
        contents(read(records(300), replace(spec, spool_bytes=n), directory=str(tmp_path))) for n in (1 << 20, 100)
    )
    assert in_memory == in_files
    assert list(tmp_path.iterdir()) == []


def test_training_starts_before_the_partition_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.data.ordering.BLOCK_ROWS", 8)
    gate = threading.Event()

    def arrow() -> Iterator[pa.RecordBatch]:
        yield from records(10)
        assert gate.wait(SECONDS)
        yield from records(10)

    with BatchSource(arrow(), SPEC, worker=0) as source:
        assert not next(source).last
        assert source.rows == 10
        gate.set()
        assert len(list(source)) == 4
        assert (source.rows, source.batches_per_epoch) == (20, 5)


@pytest.mark.parametrize("arrow", [[], records(0), records(3)[0:1] * 0, [records(5)[0].slice(0, 0)]])
def test_an_empty_partition_yields_nothing(arrow: list[pa.RecordBatch], spool_bytes: int) -> None:
    with BatchSource(iter(arrow), replace(SPEC, epochs=2, spool_bytes=spool_bytes), worker=0) as source:
        assert list(source) == []
        assert (source.rows, source.batches_per_epoch) == (0, 0)


def test_a_partition_smaller_than_a_batch_is_one_short_batch() -> None:
    (batch,) = read(records(3))
    assert (batch.size, batch.last, batch.epoch, batch.index) == (3, True, 0, 0)


def test_several_inputs_targets_and_a_target_that_is_an_input() -> None:
    image = Column("x", (2, 1))
    spec = DataSpec(features=(X, W), labels=(image, X, Y), batch_size=2, epochs=2)
    for batch in read(records(5), spec):
        wide, weight = batch.x
        assert [y.shape[1:] for y in batch.y] == [(2, 1), (2,), ()]
        np.testing.assert_array_equal(batch.y[0][..., 0], wide)
        assert batch.y[1] is wide
        np.testing.assert_array_equal(weight, batch.y[2] * 2)
        assert batch.weight is None


def test_unshuffled_views_cannot_damage_the_spool() -> None:
    for batch in read(records(8), replace(SPEC, shuffle=False, epochs=2)):
        with pytest.raises(ValueError, match="read-only"):
            batch.x[0][:] = 0


def test_rows_that_are_kept_in_memory_are_not_kept_by_arrow_as_well() -> None:
    def of_arrow(spec: DataSpec) -> list[bool]:
        given = records(8, size=8)
        arrow = given[0].column("y").to_numpy()
        return [np.shares_memory(batch.y[0], arrow) for batch in read(given, spec)]

    spec = replace(SPEC, shuffle=False)
    assert all(of_arrow(spec))  # a single epoch needs no copy
    assert not any(of_arrow(replace(spec, epochs=2)))


def test_batches_outlive_their_source(tmp_path: Path) -> None:
    spec = replace(SPEC, shuffle=False, epochs=2, spool_bytes=0)
    assert in_epochs(read(records(20), spec, directory=str(tmp_path)))[1] == list(range(20))


def column(values: range | list[Any], at: int, value: float | list[Any] | None) -> pa.Array:
    values = list(values)
    values[at] = value
    return pa.array(values)


VECTORS = [[0.0, 1.0]] * 20


@pytest.mark.parametrize(
    ("changed", "error", "name", "text"),
    [
        ({"x": None}, MissingColumnError, "x", "must have the column 'x'"),
        ({"x": pa.array(["a"] * 20)}, ColumnTypeError, "x", "type=string"),
        ({"x": column(VECTORS, 13, None)}, BadValueError, "x", "null in row 13"),
        ({"x": column(VECTORS, 13, [0.0, None])}, BadValueError, "x", "null in row 13"),
        ({"x": column(VECTORS, 13, [0.0, np.nan])}, BadValueError, "x", "nan in row 13"),
        ({"x": column(VECTORS, 13, [0.0])}, ShapeError, "x", "1 values in row 13"),
        ({"x": pa.array([[0.0, 1, 2]] * 20)}, ShapeError, "x", "3 values in row 0"),
        ({"w": column(range(20), 13, None)}, BadValueError, "w", "null in row 13"),
        ({"y": column([0] * 20, 13, 10)}, BadValueError, "y", r"\[0, 10\). Received: 10 in row 13"),
        ({"y": column([0] * 20, 13, -1)}, BadValueError, "y", "Received: -1 in row 13"),
        ({"y": column([0.0] * 20, 13, 1.5)}, BadValueError, "y", "Received: 1.5 in row 13"),
        (
            {"y": pa.array([[0, 1]] * 20)},
            ShapeError,
            "y",
            "must be class numbers; one-hot ones need.*2 values in row 0",
        ),
        ({"y": column([0] * 20, 13, None)}, BadValueError, "y", "null in row 13"),
    ],
)
@pytest.mark.parametrize("start", [(0, 0), (1, 0)])
def test_bad_rows_raise_one_typed_error_that_names_the_place(
    changed: dict[str, Any], error: type[DistkerasError], name: str, text: str, start: tuple[int, int]
) -> None:
    spec = replace(SPEC, labels=(replace(Y, classes=10),), epochs=2, batch_size=5)
    with pytest.raises(error, match=text) as caught:
        read(records(20, **{"y": pa.array([9] * 20), **changed}), spec, worker=3, start=start)
    assert type(caught.value) is error
    assert (caught.value.column, caught.value.worker) == (name, 3)
    if " in row 13" in text:
        assert caught.value.step == 2


def test_floating_labels_of_classes_must_be_whole() -> None:
    spec = replace(SPEC, labels=(Column("y", classes=20),))
    assert len(read(records(20), spec)) == 5
    with pytest.raises(BadValueError, match=r"Received: 0\.5 in row 7"):
        read(records(20, y=column([1.0] * 20, 7, 0.5)), spec)


def test_each_label_has_its_own_classes() -> None:
    spec = replace(SPEC, labels=(replace(Y, classes=10), W))
    assert len(read(records(10), spec)) == 3
    with pytest.raises(BadValueError, match="Received: 10 in row 10"):
        read(records(11), spec)


def test_rows_before_a_bad_one_are_trained_on_and_the_error_shows_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.data.ordering.BLOCK_ROWS", 4)

    def broken_input() -> Iterator[pa.RecordBatch]:
        yield from records(10)
        raise OSError("the stream broke")

    got: list[Batch] = []
    with (
        pytest.raises(OSError, match="the stream broke") as caught,
        BatchSource(broken_input(), SPEC, worker=0) as source,
    ):
        got.extend(source)
    # The second full mini-batch might be the last one, so it is not returned yet.
    assert [b.last for b in got] == [False]
    assert "broken_input" in "".join(traceback.format_tb(caught.value.__traceback__))


@pytest.mark.parametrize("epochs", [1, 3])
def test_stopping_early_ends_the_thread_and_leaves_no_file(tmp_path: Path, epochs: int) -> None:
    spec = replace(SPEC, epochs=epochs, spool_bytes=100)
    with BatchSource(iter(records(500)), spec, worker=41, depth=2, directory=str(tmp_path)) as source:
        next(source)
    assert "distkeras-batches-41" not in {thread.name for thread in threading.enumerate()}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(JobStoppedError):
        next(source)


def test_closing_ends_a_first_pass_that_has_yielded_nothing_yet() -> None:
    reached = threading.Event()

    def endless() -> Iterator[pa.RecordBatch]:
        while True:
            yield from records(50)
            reached.set()

    with BatchSource(endless(), replace(SPEC, epochs=2), worker=42, start=(1, 0)):
        assert reached.wait(SECONDS)
    assert "distkeras-batches-42" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("start", [(0, 4), (1, 4), (1, 1000)])
def test_the_error_for_a_start_beyond_the_data_says_that_the_rows_changed(start: tuple[int, int]) -> None:
    with pytest.raises(LedgerError, match="the same rows as before: 3 mini-batches in epoch") as caught:
        read(records(10), replace(SPEC, epochs=2), worker=5, start=start)
    assert (caught.value.worker, caught.value.step) == (5, start[1])


@pytest.mark.parametrize("start", [(0, 1), (0, 2), (1, 0), (1, 2)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_other_than_those_of_the_earlier_attempt_are_found_by_their_hashes(
    start: tuple[int, int], shuffle: bool
) -> None:
    spec = replace(SPEC, epochs=2, shuffle=shuffle)
    hashes = np.arange(12)
    whole = read(records(12, **{ROW_HASH: pa.array(hashes)}), spec)
    before = next(b for b, c in pairwise(whole) if (c.epoch, c.index) == start)
    hashes[[1, 2]] = hashes[[2, 1]]  # the same rows in another order
    with pytest.raises(LedgerError, match=r"same rows as before: checksum 0x[0-9a-f]{16} before mini-batch") as caught:
        read(records(12, **{ROW_HASH: pa.array(hashes)}), spec, worker=5, start=start, checksum=before.checksum)
    assert (caught.value.worker, caught.value.step) == (5, start[1])


def test_a_source_cannot_go_back_to_rows_that_were_not_kept() -> None:
    with (
        BatchSource(iter(records(10)), SPEC, worker=0) as source,
        pytest.raises(ConfigurationError, match="Received: one epoch"),
    ):
        source.rewind((0, 0))


def test_nothing_is_read_before_the_context_is_entered() -> None:
    rows = iter(records(10))
    source = BatchSource(rows, SPEC, worker=0)
    with pytest.raises(LocalProtocolError, match="after `start`"):
        next(source)
    source.close()
    assert next(rows).num_rows == 5


def test_a_start_at_the_end_reads_nothing() -> None:
    def untouchable() -> Iterator[None]:
        raise AssertionError
        yield

    assert read(untouchable(), replace(SPEC, epochs=2), start=(2, 0)) == []


@pytest.mark.parametrize(
    "arguments",
    [{"worker": -1}, {"start": (0, -1)}, {"start": (-1, 0)}, {"start": (1, 1)}, {"depth": 0}, {"window": 0}],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Received: "):
        read([], **arguments)


def test_runs_of_equal_rows_are_shuffled() -> None:
    # Hash partitioning of few distinct rows results in runs of one class.
    labels = np.repeat(np.arange(10), 100)
    order = in_epochs(read(records(1000, y=pa.array(labels)), replace(SPEC, batch_size=20)))[0]
    assert sum(a == b for a, b in pairwise(order)) < 200
