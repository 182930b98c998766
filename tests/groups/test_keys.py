"""Keys of groups, in columns of Arrow."""

from __future__ import annotations

from itertools import groupby, pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from distkeras.groups.keys import Key, distinct_keys, key_fields, key_names, key_of, key_text, keyed_runs
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, MissingColumnError

Row = tuple[str | None, int | None, int]
ROWS = st.lists(st.tuples(st.sampled_from([None, "a", "b", ""]), st.sampled_from([None, 0, 1]), st.integers(0, 9)))


def batch(rows: list[Row]) -> pa.RecordBatch:
    columns = [[row[number] for row in rows] for number in range(3)]
    arrays = [
        pa.array(values, kind) for values, kind in zip(columns, (pa.string(), pa.int64(), pa.int64()), strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=["shop", "year", "x"])


@given(ROWS, st.lists(st.integers(0, 12), max_size=3))
def test_runs_are_those_of_groupby_for_any_record_batches(rows: list[Row], cuts: list[int]) -> None:
    rows.sort(key=lambda row: (row[0] is not None, row[0] or "", row[1] is not None, row[1] or 0))
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    records = [batch(rows[start:stop]) for start, stop in pairwise(bounds)]
    groups: dict[Key, list[int]] = {}
    last = None
    for key, record in keyed_runs(iter(records), 2):
        assert key == last or key not in groups, "the rows of a key must be adjacent"
        groups.setdefault(key, []).extend(record.column("x").to_pylist())
        last = key
    assert list(groups.items()) == [
        (key, [row[2] for row in of_key]) for key, of_key in groupby(rows, key=lambda row: row[:2])
    ]


@given(ROWS.filter(bool))
def test_distinct_keys_name_the_key_of_each_row(rows: list[Row]) -> None:
    keys, places = distinct_keys(batch(rows).columns[:2])
    assert [keys[place] for place in places] == [row[:2] for row in rows]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("by", ["", [], ["a", "a"], 7, [7]])
def test_invalid_names_of_key_columns_are_refused(by: object) -> None:
    with pytest.raises(ConfigurationError, match="`by` must be"):
        key_names(by)  # type: ignore[arg-type]  # the test passes a wrong type


def test_columns_that_cannot_be_keys_are_refused() -> None:
    schema = T.StructType(
        [
            T.StructField("shop", T.StringType()),
            T.StructField("weight", T.DoubleType()),
            T.StructField("loss", T.LongType()),
        ]
    )
    assert [field.name for field in key_fields(schema, ["shop"], ["loss"])] == ["shop"]
    with pytest.raises(ColumnTypeError, match="type=double"):
        key_fields(schema, ["weight"], [])
    # With this collation "a" and "A" are one key for Spark and two for Arrow.
    collated = T.StructType([T.StructField("shop", T.StringType("UTF8_LCASE"))])
    with pytest.raises(ColumnTypeError, match="strings without a collation"):
        key_fields(collated, ["shop"], [])
    with pytest.raises(ConfigurationError, match="must not name a column that the result has"):
        key_fields(schema, ["loss"], ["loss"])
    with pytest.raises(MissingColumnError, match="is it 'shop'"):
        key_fields(schema, ["shops"], [])


def test_a_key_is_a_value_or_a_mapping() -> None:
    assert key_of("a", ["shop"]) == ("a",)
    assert key_of({"year": 1, "shop": None}, ["shop", "year"]) == (None, 1)
    assert key_text((None, 1), ["shop", "year"]) == "shop=None, year=1"
    for wrong in ("a", {"shop": "a"}, {"shop": "a", "year": 1, "month": 2}):
        with pytest.raises(ConfigurationError, match="`key` must be a mapping"):
            key_of(wrong, ["shop", "year"])
