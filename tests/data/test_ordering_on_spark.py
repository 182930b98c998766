from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from support.cases import rest_slow

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column, to_numpy
from distkeras.data.ordering import ROW_HASH, partitioned
from distkeras.data.schema import quoted, ready_columns
from distkeras.data.source import BatchSource
from distkeras.ps.errors import BadValueError, ColumnTypeError, ConfigurationError, MissingColumnError, ShapeError

SPEC = DataSpec(features=(Column("x", (3,)),), labels=(Column("y", (), "int64", classes=10),), batch_size=16)


def arrow_ready(df: DataFrame, names: list[str]) -> DataFrame:
    """Return the columns in the form that training reads."""
    return df.select(*ready_columns(df.schema.fields, DataSpec(features=tuple(map(Column, names)))))


@pytest.fixture(scope="module")
def parquet(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of six files with 1200 rows, of which one in four is a duplicate."""
    path = str(tmp_path_factory.mktemp("rows") / "parquet")
    numbers = F.col("id") % 900
    rows = spark.range(0, 1200, numPartitions=6).select(
        F.array(numbers.cast("float"), (numbers / 7).cast("float"), F.lit(0.5).cast("float")).alias("x"),
        (numbers % 10).alias("y"),
        F.lit("never read").alias("text"),
    )
    rows.write.parquet(path)
    return path


def rows_by_partition(df: DataFrame) -> dict[int, list[tuple[Any, ...]]]:
    """Return the rows of each partition, in the order in which its task reads them."""

    def label(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        for record in records:
            partitions = pa.array([partition] * record.num_rows, pa.int32())
            names = [name for name in record.schema.names if name != ROW_HASH]
            columns = [*map(record.column, names), partitions]
            yield pa.RecordBatch.from_arrays(columns, names=[*names, "partition"])

    rows = df.mapInArrow(label, "x array<float>, y long, partition int").toArrow().to_pylist()
    partitions: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        partitions.setdefault(row["partition"], []).append((*row["x"], row["y"]))
    return partitions


def read(df: DataFrame, spec: DataSpec) -> list[Any]:
    with BatchSource(iter(partitioned(df, spec, 1).toArrow().to_batches()), spec, worker=0) as source:
        return list(source)


def test_every_row_is_in_one_partition_and_only_the_named_columns_are_sent(spark: SparkSession, parquet: str) -> None:
    df = spark.read.parquet(parquet)
    laid_out = partitioned(df, SPEC, 3)
    assert laid_out.columns == ["x", "y", ROW_HASH]
    partitions = rows_by_partition(laid_out)
    assert set(partitions) == {0, 1, 2}
    assert min(map(len, partitions.values())) > 200
    expected = [(*row.x, row.y) for row in df.collect()]
    assert sorted(chain(*partitions.values())) == sorted(expected)


@pytest.mark.slow
def test_the_order_depends_only_on_the_values(spark: SparkSession, parquet: str, tmp_path: Path) -> None:
    first, second = (rows_by_partition(partitioned(spark.read.parquet(parquet), SPEC, 2)) for _ in range(2))
    assert first == second
    # The same rows in other files, at other positions and in other splits.
    spark.read.parquet(parquet).repartition(3).orderBy(F.rand(1)).write.parquet(str(tmp_path / "again"))
    assert rows_by_partition(partitioned(spark.read.parquet(str(tmp_path / "again")), SPEC, 2)) == first


def test_the_layout_depends_on_the_seed(spark: SparkSession, parquet: str) -> None:
    df = spark.read.parquet(parquet)
    seeds = [
        rows_by_partition(partitioned(df, DataSpec(features=SPEC.features, labels=SPEC.labels, seed=n), 2))
        for n in (0, 1)
    ]
    assert set(seeds[0][0]) != set(seeds[1][0])


def test_a_killed_python_worker_is_retried_on_the_same_rows(spark: SparkSession, parquet: str, tmp_path: Path) -> None:
    directory = str(tmp_path)

    def train(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        numbers = []
        with BatchSource(records, SPEC, worker=task.partitionId()) as source:
            for batch in source:
                numbers.append(batch.x[0][:, 0].tolist())
                if task.partitionId() == 0 and task.attemptNumber() == 0 and batch.index == 20:
                    Path(directory, "first").write_text(repr(numbers))
                    os.kill(os.getpid(), signal.SIGKILL)
        yield pa.RecordBatch.from_pydict(
            {"partition": [task.partitionId()], "attempt": [task.attemptNumber()], "seen": [repr(numbers)]}
        )

    laid_out = partitioned(spark.read.parquet(parquet), SPEC, 2)
    rows = laid_out.mapInArrow(train, "partition long, attempt long, seen string").collect()
    attempts = {row.partition: row.attempt for row in rows}
    assert attempts == {0: 1, 1: 0}
    before = (tmp_path / "first").read_text()
    after = next(row.seen for row in rows if row.partition == 0)
    assert len(before) > 1000
    assert after.startswith(before[:-1])


def test_few_distinct_rows_may_leave_partitions_empty(spark: SparkSession) -> None:
    df = spark.range(40).select(
        F.array(*[F.lit(1.0)] * 3).cast("array<float>").alias("x"), F.lit(1).cast("long").alias("y")
    )
    assert [len(rows) for rows in rows_by_partition(partitioned(df, SPEC, 3)).values()] == [40]
    assert rows_by_partition(partitioned(df.limit(0), SPEC, 3)) == {}


def test_partitioned_already_keeps_the_partitions(spark: SparkSession) -> None:
    df = spark.range(0, 100, numPartitions=4).select(
        F.array(*[F.col("id").cast("float")] * 3).alias("x"), F.col("id").alias("y")
    )
    partitions = rows_by_partition(partitioned(df, SPEC, 4, partitioned_already=True))
    assert {k: [row[-1] for row in rows] for k, rows in partitions.items()} == {
        k: list(range(25 * k, 25 * k + 25)) for k in range(4)
    }


def test_a_column_may_have_any_name(spark: SparkSession) -> None:
    df = spark.createDataFrame([(1.0, 2.0, 3.0, 4, 5)], ["a.b", "a`b", "Hash", "hash_", "with space"])
    spec = DataSpec(features=tuple(map(Column, df.columns)))
    (batch,) = read(df, spec)
    assert [x.tolist() for x in batch.x] == [[1], [2], [3], [4], [5]]


@pytest.mark.parametrize(
    "name", ["a.b", pytest.param("a`b", marks=pytest.mark.slow), pytest.param("with space", marks=pytest.mark.slow)]
)
def test_a_quoted_name_is_parsed_as_one_column(spark: SparkSession, name: str) -> None:
    df = spark.createDataFrame([(1.0,), (2.0,)], [name])
    assert [row[0] for row in df.where(f"{quoted(name)} > 1").selectExpr(quoted(name)).collect()] == [2.0]
    assert [row[0] for row in df.groupBy().mean(quoted(name)).collect()] == [1.5]
    assert df.select(F.col(quoted(name))).columns == [name]


def test_a_worker_count_below_one_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="Received: workers=0"):
        partitioned(spark.range(1), DataSpec(features=(Column("id"),)), 0)


def test_numbers_of_every_type_and_both_kinds_of_vectors_are_read(spark: SparkSession) -> None:
    df = spark.createDataFrame(
        [
            (Vectors.dense(1, 2, 3), True, Decimal("1.5"), [Decimal("2.5")], [[True], [False]], 7),
            (Vectors.sparse(3, [1], [5.0]), False, Decimal("0"), [Decimal("1")], [[False], [False]], 8),
        ],
        T.StructType()
        .add("vector", VectorUDT())
        .add("flag", "boolean")
        .add("price", "decimal(5,2)")
        .add("prices", T.ArrayType(T.DecimalType(5, 2)))
        .add("mask", T.ArrayType(T.ArrayType(T.BooleanType())))
        .add("n", "byte"),
    )
    (table,) = arrow_ready(df, df.columns).toArrow().combine_chunks().to_batches()
    assert to_numpy(table["vector"], Column("vector", (3,))).tolist() == [[1, 2, 3], [0, 5, 0]]
    assert table["vector"].type.value_type == pa.float32()
    assert to_numpy(table["flag"], Column("flag")).tolist() == [1, 0]
    assert to_numpy(table["price"], Column("price")).tolist() == [1.5, 0]
    assert to_numpy(table["prices"], Column("prices", (1,))).tolist() == [[2.5], [1]]
    assert to_numpy(table["mask"], Column("mask", (2, 1), "int8")).tolist() == [[[1], [0]], [[0], [0]]]
    assert to_numpy(table["n"], Column("n", (), "int32")).tolist() == [7, 8]


def test_decimals_that_a_double_cannot_represent_stay_exact(spark: SparkSession) -> None:
    ids = [2**53 + 1, 2**63 - 1]
    df = spark.createDataFrame([(Decimal(i), [Decimal(i)]) for i in ids], "id decimal(20,0), ids array<decimal(20,0)>")
    columns = Column("id", (), "int64"), Column("ids", (1,), "int64")
    table = partitioned(df, DataSpec(columns), 1).toArrow().combine_chunks().to_batches()[0]
    assert sorted(to_numpy(table["id"], columns[0]).tolist()) == ids
    assert sorted(to_numpy(table["ids"], columns[1]).ravel().tolist()) == ids


@pytest.mark.parametrize(
    ("kind", "values", "error", "text"),
    [
        (VectorUDT(), [Vectors.dense(1, 2, 3), None], BadValueError, "null"),
        pytest.param(
            VectorUDT(),
            [Vectors.dense(1, 2, 3), Vectors.dense(1, float("nan"), 3)],
            BadValueError,
            "nan",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            VectorUDT(), [Vectors.sparse(3, [0], [float("inf")])], BadValueError, "inf", marks=pytest.mark.slow
        ),
        (VectorUDT(), [Vectors.dense(1, 2, 3), Vectors.sparse(4, [], [])], ShapeError, "4 values"),
        pytest.param(
            T.ArrayType(T.DoubleType()),
            [[1.0, 2.0, 3.0], [1.0, None, 3.0]],
            BadValueError,
            "null",
            marks=pytest.mark.slow,
        ),
        (T.ArrayType(T.DoubleType()), [[1.0, 2.0, 3.0], [1.0, 2.0]], ShapeError, "2 values"),
        pytest.param(
            T.ArrayType(T.DecimalType(5, 2)), [[Decimal(1)] * 3, None], BadValueError, "null", marks=pytest.mark.slow
        ),
        pytest.param(T.DoubleType(), [1.0], ShapeError, "a single number", marks=pytest.mark.slow),
    ],
)
def test_bad_rows_raise_their_typed_error_through_spark(
    spark: SparkSession, kind: Any, values: list[Any], error: type[BadValueError] | type[ShapeError], text: str
) -> None:
    df = spark.createDataFrame([(v, 1) for v in values], T.StructType().add("x", kind).add("y", "long"))
    with pytest.raises(error, match=f"Received: {text} in row") as caught:
        read(df, SPEC)
    assert (caught.value.column, caught.value.worker) == ("x", 0)


def test_the_error_for_a_missing_column_names_the_existing_columns(spark: SparkSession) -> None:
    df = spark.createDataFrame([(1, 2)], ["features", "label"])
    with pytest.raises(
        MissingColumnError, match=r"'Features' \(or is it 'features'\?\). Received: columns=\['features', 'label'\]"
    ) as caught:
        arrow_ready(df, ["label", "Features"])
    assert caught.value.column == "Features"


@pytest.mark.parametrize(
    "kind",
    rest_slow(
        ["string", "binary", "date", "array<string>", "struct<a:int>", "map<string,int>"], "string", "struct<a:int>"
    ),
)
def test_types_without_numbers_are_refused_on_the_driver(spark: SparkSession, kind: str) -> None:
    df = spark.createDataFrame([], f"c {kind}")
    with pytest.raises(ColumnTypeError, match=f"Received: type={kind}") as caught:
        arrow_ready(df, ["c"])
    assert caught.value.column == "c"


def test_an_ambiguous_name_is_refused(spark: SparkSession) -> None:
    df = spark.createDataFrame([(1, 2)], ["a", "b"]).toDF("a", "a")
    with pytest.raises(ConfigurationError, match="2 columns named 'a'"):
        arrow_ready(df, ["a"])


def test_vectors_of_mllib_are_converted(spark: SparkSession) -> None:
    from pyspark.mllib.linalg import Vectors as OlderVectors

    df = spark.createDataFrame([(OlderVectors.dense(1, 2),), (OlderVectors.sparse(2, [1], [3.0]),)], ["v"])
    assert np.stack(arrow_ready(df, ["v"]).toPandas()["v"].tolist()).tolist() == [[1, 2], [0, 3]]
