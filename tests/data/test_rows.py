"""Rows of any length: their padding, which is Keras' own, their memory, and their order in mini-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkeras.data.batches import DataSpec, in_blocks
from distkeras.data.columns import Column, to_numpy
from distkeras.data.ordering import EpochOrder
from distkeras.data.padding import paddings_of, with_padding
from distkeras.data.rows import Padding, RaggedRows, is_aligned, of_one_length
from distkeras.data.source import BatchSource
from distkeras.data.spool import Spool
from distkeras.ps.errors import BadValueError, ConfigurationError, ShapeError
from distkeras.settings import TrainSettings

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40)
PADDINGS = st.builds(
    Padding,
    value=st.sampled_from([None, 7]),
    side=st.sampled_from(["post", "pre"]),
    longest=st.sampled_from([None, 1, 4, 20]),
    cut=st.sampled_from(["post", "pre"]),
    multiple=st.sampled_from([None, 1, 3, "few"]),
)
TOKENS = Column("tokens", (None,), "int32")
PAIRS = Column("pairs", (None, 2))


def lists(lengths: Sequence[int]) -> list[list[int]]:
    ends = np.cumsum(lengths)
    return [list(range(end - length + 1, end + 1)) for length, end in zip(lengths, ends, strict=True)]


def ragged(lengths: Sequence[int], *shape: int) -> RaggedRows:
    steps = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return RaggedRows(np.broadcast_to(steps.reshape(-1, *[1] * len(shape)), (len(steps), *shape)).copy(), offsets)


def as_lists(rows: Any) -> list[Any]:
    return [rows.steps[first:end].tolist() for first, end in itertools.pairwise(rows.offsets)]


@given(lengths=LENGTHS, padding=PADDINGS)
def test_rows_are_padded_as_keras_pads_sequences(lengths: list[int], padding: Padding) -> None:
    rows = ragged(lengths)
    order = np.random.default_rng(0).permutation(len(lengths))
    found = rows.padded(order, padding)
    kept = min(max(lengths), padding.longest or 100)
    expected = keras.utils.pad_sequences(
        [lists(lengths)[row] for row in order] if kept else [[] for _ in order],
        maxlen=padding.length(kept),
        padding=padding.side,
        truncating=padding.cut,
        value=padding.value or 0,
    )
    if padding.longest is not None and padding.length(kept) > padding.longest:  # Keras cuts to its length only
        cut = [row[-padding.longest :] if padding.cut == "pre" else row[: padding.longest] for row in lists(lengths)]
        expected = keras.utils.pad_sequences(
            [cut[row] for row in order], maxlen=padding.length(kept), padding=padding.side, value=padding.value or 0
        )
    np.testing.assert_array_equal(found, expected)
    assert is_aligned(found)


@given(st.integers(0, 5000), st.sampled_from([None, 1, 7, "few"]), st.sampled_from([None, 100]))
def test_a_mini_batch_is_long_enough_and_hardly_longer(
    steps: int, multiple: int | str | None, longest: int | None
) -> None:
    steps = steps if longest is None else min(steps, longest)
    length = Padding(multiple=multiple, longest=longest).length(steps)
    assert length >= max(1, steps)
    if multiple == "few":
        assert length <= max(8, 1.5 * steps)
    else:
        assert (length - max(1, steps), length % (multiple or 1)) < ((multiple or 1), 1)  # type: ignore[operator]  # no text


def test_few_lengths_are_few() -> None:
    assert sorted({Padding(multiple="few").length(steps) for steps in range(1, 65)}) == [8, 12, 16, 24, 32, 48, 64]
    assert Padding(multiple="few", longest=50).length(49) == 50


@pytest.mark.parametrize(
    "arguments",
    [{"value": float("nan")}, {"side": "left"}, {"longest": 0}, {"cut": "end"}, {"multiple": 0}, {"multiple": "some"}],
)
def test_invalid_paddings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Received: "):
        Padding(**arguments)


@given(lengths=LENGTHS, cuts=st.lists(st.integers(0, 40), max_size=4), size=st.integers(1, 9), copied=st.booleans())
def test_blocks_have_the_same_rows(lengths: list[int], cuts: list[int], size: int, copied: bool) -> None:
    rows = ragged(lengths, 2)
    ends = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    pieces = [rows[first:end] for first, end in itertools.pairwise(ends)]
    if copied:
        pieces = [RaggedRows(piece.own_steps.copy(), piece.offsets - piece.offsets[0]) for piece in pieces]
    blocks: list[Any] = [block for (block,) in in_blocks([(piece,) for piece in pieces], size)]
    assert [len(block) for block in blocks[:-1]] == [size] * (len(blocks) - 1)
    assert [row for block in blocks for row in as_lists(block)] == as_lists(rows)
    if not copied:
        assert all(block.steps is rows.steps for block in blocks)


@given(lengths=LENGTHS, cuts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_any_ranges_of_rows_are_joined(lengths: list[int], cuts: list[tuple[int, int]]) -> None:
    rows = ragged(lengths)
    parts = [rows[first:end] for first, end in cuts]
    found = RaggedRows.concatenated(parts)
    assert as_lists(found) == [row for first, end in cuts for row in lists(lengths)[first:end]]
    assert len(found) == len(found.lengths) == sum(map(len, parts))


@given(lengths=LENGTHS, data=st.data())
def test_rows_are_picked_by_number_and_put_back(lengths: list[int], data: st.DataObject) -> None:
    rows = ragged(lengths)
    picked = np.array(data.draw(st.permutations(range(len(lengths)))))
    assert as_lists(rows[picked]) == [as_lists(rows)[number] for number in picked]


def test_rows_of_one_length_are_arrays() -> None:
    rows, fixed = ragged([2, 0, 1, 2]), np.arange(4)
    parts = of_one_length([rows, fixed], [Padding(), Padding()])
    found = [(places.tolist(), [array.tolist() for array in arrays]) for places, arrays in parts]
    assert found == [([1, 2], [[[0], [3]], [1, 2]]), ([0, 3], [[[1, 2], [4, 5]], [0, 3]])]
    ((places, arrays),) = of_one_length([ragged([2, 3])], [Padding(longest=2, multiple=3)])
    assert (places.tolist(), arrays[0].tolist()) == ([0, 1], [[1, 2, 0], [4, 5, 0]])


@given(pieces=st.lists(LENGTHS, min_size=1, max_size=5), budget=st.integers(0, 4000), read_between=st.booleans())
def test_memory_and_files_contain_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[list[int]], budget: int, read_between: bool
) -> None:
    spool = Spool((TOKENS, Column("n", (), "int64")), budget, str(tmp_path_factory.mktemp("spool")))
    expected: list[list[int]] = []
    nbytes = 0
    for lengths in pieces:
        rows, numbers = ragged(lengths), np.arange(len(lengths))
        kept, _ = spool.append((rows, numbers))
        assert as_lists(kept) == as_lists(rows)
        expected += as_lists(rows)
        nbytes += rows.own_steps.nbytes + 16 * len(lengths)
        if read_between:
            assert as_lists(spool.arrays()[0]) == expected
    assert spool.on_disk == (nbytes + 8 > budget)  # the first row begins at 0
    held = spool.arrays()
    spool.close()
    assert as_lists(held[0]) == expected


@pytest.mark.parametrize(
    ("values", "column", "expected"),
    [
        ([[1, 2], [], [3]], TOKENS, [[1, 2], [], [3]]),
        ([[1.0, 2, 3, 4], [], [5, 6]], PAIRS, [[[1, 2], [3, 4]], [], [[5, 6]]]),
        ([[[1.0, 2], [3, 4]], [[5, 6]]], PAIRS, [[[1, 2], [3, 4]], [[5, 6]]]),
        ([[[1.0], [2]], [[3]]], Column("c", (None,)), [[1, 2], [3]]),
        ([1, 2], TOKENS, [[1], [2]]),
        ([[], []], PAIRS, [[], []]),
        ([], TOKENS, []),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_columns_become_rows_of_any_length(values: list[Any], column: Column, expected: list[Any], first: int) -> None:
    kind = pa.array(values).type if values else pa.list_(pa.int32())
    if values == [[], []]:
        kind = pa.list_(pa.list_(pa.float32()))
    found: Any = to_numpy(pa.array(values, kind)[first:], column)
    assert as_lists(found) == expected[first:]
    assert (found.steps.dtype, found.steps.shape[1:]) == (np.dtype(column.dtype), column.step_shape)


@pytest.mark.parametrize(
    ("values", "column", "kind", "row"),
    [
        ([[1], None], TOKENS, BadValueError, 1),
        ([[1], [2, None]], TOKENS, BadValueError, 1),
        ([[1.5], [2.0]], TOKENS, BadValueError, 0),
        ([[], [1.0, 2], [float("nan"), 1]], PAIRS, BadValueError, 2),
        ([[1.0, 2], [3]], PAIRS, ShapeError, 1),
        ([[[1.0, 2]], [[1, 2], [3]]], PAIRS, ShapeError, 1),
        ([[[1.0, 2]], [[1, 2], None]], PAIRS, BadValueError, 1),
        ([[1], [1, 7]], replace(TOKENS, table=("embedding", 5)), BadValueError, 1),
    ],
)
def test_bad_values_name_their_row(values: list[Any], column: Column, kind: type[Exception], row: int) -> None:
    with pytest.raises(kind, match=rf"in row {10 + row}\b") as caught:
        to_numpy(pa.array(values), column, worker=3, first_row=10)
    assert (caught.value.column, caught.value.worker) == (column.name, 3)  # type: ignore[attr-defined]  # typed errors


def test_decoded_values_have_any_length() -> None:
    column = replace(PAIRS, decode=lambda n: np.full((n, 2), n, np.float32))
    assert as_lists(to_numpy(pa.array([2, 1]), column)) == [[[2, 2], [2, 2]], [[1, 1]]]
    with pytest.raises(ShapeError, match="in row 1"):
        to_numpy(pa.array([2, 1]), replace(column, decode=lambda n: np.zeros((2, n))))


def spec_of(*, bucket: bool = False, **options: Any) -> DataSpec:
    tokens = replace(TOKENS, padding=Padding(bucket=bucket))
    return DataSpec((tokens,), (Column("n", (), "int64"),), batch_size=4, seed=3, **options)


def mini_batches(lengths: Sequence[int], spec: DataSpec, records: Sequence[int] = ()) -> list[Any]:
    values = pa.array(lists(lengths), pa.list_(pa.int32()))
    table = pa.RecordBatch.from_arrays([values, pa.array(range(len(lengths)))], names=["tokens", "n"])
    cuts = [0, *records, len(lengths)]
    parts = [table[first:end] for first, end in itertools.pairwise(cuts)]
    with BatchSource(iter(parts), spec, worker=1) as source:
        found = [(b.epoch, b.index, b.last, b.x[0].tolist(), b.y[0].tolist()) for b in source]
        steps = [sum(len(row) for row in x) for _, _, _, x, _ in found]
        assert source.padding == pytest.approx(1 - spec.epochs * sum(lengths) / sum(steps))
    return found


@given(lengths=LENGTHS, cuts=st.lists(st.integers(0, 40), max_size=3), by_length=st.booleans(), shuffle=st.booleans())
def test_mini_batches_have_each_row_once_in_each_epoch(
    lengths: list[int], cuts: list[int], by_length: bool, shuffle: bool
) -> None:
    spec = spec_of(epochs=3, shuffle=shuffle, bucket=by_length)
    found = mini_batches(lengths, spec)
    records = sorted(min(cut, len(lengths)) for cut in cuts)
    assert found == mini_batches(lengths, spec, records)  # it does not depend on record batches
    for epoch in range(3):
        batches = [(x, y) for e, _, _, x, y in found if e == epoch]
        assert sorted(row for _, y in batches for row in y) == list(range(len(lengths)))
        for x, y in batches:
            longest = max(1, *(lengths[row] for row in y))
            assert x == [lists(lengths)[row] + [0] * (longest - lengths[row]) for row in y]


@given(LENGTHS, PADDINGS, st.integers(1, 5), st.booleans(), st.booleans())
def test_the_mini_batches_of_a_window_share_memory(
    lengths: list[int], padding: Padding, window: int, shuffle: bool, bucket: bool
) -> None:
    """Each one is as long as if it were padded alone, and a stack has its values up to this length."""
    features = (replace(TOKENS, padding=replace(padding, bucket=bucket and shuffle)), PAIRS)
    spec = DataSpec(features, (Column("n", (), "int64"),), batch_size=4, seed=3, shuffle=shuffle)
    rows = ragged(lengths), ragged(lengths[::-1], 2)
    batches = [
        cut.batch(0, 0, False) for cut in EpochOrder(spec, 1, window).cut((*rows, np.arange(len(lengths))), 0, 0)
    ]
    for batch in batches:
        assert (batch.stack is None) == (batch.size < 4)
        for number, (column, array) in enumerate(zip(features, batch.x, strict=True)):
            alone = rows[number].padded(batch.y[0], column.padding)
            np.testing.assert_array_equal(array, alone)
            assert not array.flags.writeable
            if batch.stack is None:
                continue
            assert batch.stack.lengths is not None
            assert batch.stack.lengths[batch.place, number] == alone.shape[1]
            np.testing.assert_array_equal(batch.stack.x[number][batch.place, :, : alone.shape[1]], alone)
            assert is_aligned(batch.stack.x[number])
        if batch.stack is not None:
            assert batch.stack.lengths is not None
            assert batch.stack.lengths[batch.place, 2] == 0  # the label


def test_few_mini_batches_of_long_rows_are_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.data.ordering.GATHER_BYTES", 4 * 20 * 4 * 6)  # six mini-batches of 20 steps
    columns = (ragged([20] * 100), np.arange(100))
    batches = [cut.batch(0, 0, False) for cut in EpochOrder(spec_of(), 1, 4).cut(columns, 0, 0)]
    sizes = [len(list(group)) for _, group in itertools.groupby(id(batch.stack) for batch in batches)]
    assert sizes == [4, 4, 4, 4, 4, 4, 1]


@given(lengths=st.lists(st.sampled_from([1, 2, 3, 90, 1000]), min_size=1, max_size=60), window=st.integers(1, 9))
def test_memory_is_at_most_twice_that_of_the_mini_batches(lengths: list[int], window: int) -> None:
    columns = (ragged(lengths), np.arange(len(lengths)))
    batches = [cut.batch(0, 0, False) for cut in EpochOrder(spec_of(), 1, window).cut(columns, 0, 0)]
    whole = [batch for batch in batches if batch.stack is not None]
    stacks = {id(batch.stack): batch.stack for batch in whole}.values()
    own = sum(batch.x[0].nbytes + batch.y[0].nbytes for batch in batches)
    assert sum(stack.x[0].nbytes for stack in stacks if stack is not None) <= 2 * own
    if len(set(lengths)) == 1:
        assert len(stacks) <= 1


def test_rows_of_like_length_share_a_mini_batch() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 4 * 64 * 3 + 2)
    columns = (ragged(lengths.tolist()), np.arange(len(lengths)))

    def padded(**options: Any) -> tuple[int, list[int]]:
        cuts = list(EpochOrder(spec_of(**options), 0, 1).cut(columns, 0, 1))
        batches = [cut.batch(1, 0, False) for cut in cuts]
        return sum(batch.x[0].size for batch in batches), [batch.x[0].shape[1] for batch in batches]

    plain, by_length = padded(), padded(bucket=True)
    assert by_length[0] < 1.1 * lengths.sum() < 1.3 * lengths.sum() < plain[0]
    assert by_length[1][:64] != sorted(by_length[1][:64])  # mini-batches come in a random order


@pytest.mark.parametrize("block_rows", [8, 300])
def test_buckets_within_blocks_of_the_first_epoch_keep_their_rows(
    monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr("distkeras.data.ordering.BLOCK_ROWS", block_rows)
    rows, bucket, spec = 700, 4 * 64, spec_of(epochs=2, bucket=True)
    lengths = np.random.default_rng(0).integers(1, 60, rows).tolist()
    found = mini_batches(lengths, spec)
    assert found == mini_batches(lengths, spec, [1, 299, 600])
    orders = [[row for e, _, _, _, y in found if e == epoch for row in y] for epoch in range(2)]
    assert [sorted(order) for order in orders] == [list(range(rows))] * 2
    block = max(bucket, block_rows)
    for start in range(0, rows, block):  # a block is shuffled, but has the rows that came
        assert sorted(orders[0][start : start + block]) == list(range(rows))[start : start + block]
    padded = sum(len(row) for _, _, _, x, _ in found for row in x)
    assert padded < 1.15 * 2 * sum(lengths)
    table = pa.RecordBatch.from_pydict({"tokens": lists(lengths), "n": range(rows)})
    with BatchSource(iter([table]), spec, worker=1, start=(0, 90)) as source:  # as after a worker's death
        assert [batch.x[0].tolist() for batch in source] == [x for _, _, _, x, _ in found[90:]]


def tags(**options: Any) -> Column:
    return Column("tags", (None,), "int32", classes=3, **options)


@pytest.mark.parametrize("padding", [Padding(bucket=True), {"x": Padding(bucket=True)}])
def test_buckets_need_a_random_order(padding: Any) -> None:
    with pytest.raises(ConfigurationError, match="needs `shuffle`"):
        TrainSettings(padding=padding, shuffle=False)


def test_labels_and_weights_follow_their_input() -> None:
    spec = DataSpec((TOKENS, PAIRS), (tags(ignored=-1, steps_of="tokens"),), Column("w", (None,), steps_of="pairs"))
    given = Padding(longest=8, side="pre", value=9)
    found = with_padding(spec, given, few=True)
    assert [column.padding for column in found.columns] == [
        Padding(value, "pre", 8, multiple="few") for value in (9, 9, -1, 0)
    ]
    apart = with_padding(spec, {"tokens": given, "w": Padding(multiple=5)}, few=False)
    assert [column.padding for column in apart.columns] == [
        Padding(9, "pre", 8, multiple=1),
        Padding(0, multiple=1),
        Padding(-1, "pre", 8, multiple=1),
        Padding(0, multiple=5),
    ]
    assert TOKENS.longest_shape == (None,)
    assert found.features[1].longest_shape == (8, 2)


def test_lengths_are_not_rounded_if_labels_have_others() -> None:
    """A convolution without padding makes 10 steps of 12, and a mini-batch's 8 labels must fit the 8 steps of 10."""
    found = with_padding(DataSpec((TOKENS,), (tags(),)), Padding(longest=20), few=True)
    assert [column.padding for column in found.columns] == [Padding(0, longest=20, multiple=1), Padding(0, multiple=1)]


def test_a_row_that_makes_a_mini_batch_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.data.rows._PADDED_BYTES_MAX", 100)
    with pytest.raises(ShapeError, match=r"Padding\(longest=.*a row of 9 steps of 4 bytes"):
        ragged([9, 1, 1]).padded(np.arange(3), Padding())
    assert ragged([9, 1, 1]).padded(np.arange(3), Padding(longest=5)).shape == (3, 5)


@pytest.mark.parametrize(
    ("padding", "text"),
    [
        ({"other": Padding()}, r"rows have any length, \['tokens', 'tags'\]"),
        ({"tokens": Padding(0.5)}, "exact as int32"),
        ({"tokens": Padding(9)}, "ids of 'embedding'"),
        ({"tags": Padding(-2)}, r"labels must be integers in \[0, 3\)"),
    ],
)
def test_paddings_that_do_not_fit_are_refused(padding: dict[str, Padding], text: str) -> None:
    spec = DataSpec((replace(TOKENS, table=("embedding", 9)),), (tags(),))
    with pytest.raises(ConfigurationError, match=text):
        with_padding(spec, padding, few=False)


def test_a_padding_needs_rows_of_any_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must be of columns"):
        with_padding(DataSpec((Column("x"),)), Padding(), few=False)
    for value in ("post", {"x": "post"}, {1: Padding()}):
        with pytest.raises(ConfigurationError, match="must be a `distkeras"):
            paddings_of(value)
    assert paddings_of({"x": Padding()}) == {"x": Padding()}
