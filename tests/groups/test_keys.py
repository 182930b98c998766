"""Keys of groups, which only Spark compares: of every type, in several zones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from support.present import present

from distkeras import Trainer
from distkeras.groups.keys import key_fields, key_names, key_row, plain_keys, require_plain
from distkeras.ml.groups import KerasGroupModel
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, MissingColumnError

#: Columns of every type that a key may have, as functions of a group's number, 0 to 3. Spark takes 0.0 and -0.0 for one
#: value, and "a" and "A" under a collation without case; the instants lie in the hour that the end of daylight saving
#: repeats in New York, an hour and a microsecond apart; the text of one group is not UTF-8.
KEYS = {
    "tiny": "cast(g as tinyint)",
    "small": "cast(g as smallint)",
    "whole": "cast(g as int)",
    "long": "9007199254740993 + g",
    "single": "cast(g as float)",
    "number": "case when g < 3 then g else double('NaN') end",
    "exact": "cast(g as decimal(38, 18))",
    "flag": "g % 2 = 0",
    "text": "case g when 1 then cast(unhex('FF41') as string) else concat('ä ', g) end",
    "bytes": "unhex(concat('FF0', g))",
    "cased": "collate(concat('ö', g), 'UTF8_LCASE')",
    "day": "date'2020-02-27' + cast(g as int)",
    "moment": "timestamp_micros(1604206800000000 + case g when 0 then 0 when 1 then 3600000000 else g end)",
    "local": "timestamp_ntz'2020-03-08 01:30:00' + make_dt_interval(0, cast(g as int))",
    "length": "make_dt_interval(0, 0, cast(g as int))",
    "list": "array(g, null)",
    "pair": "struct(g as a, case when g < 2 then 'x' end as b)",
    "absent": "case when g > 1 then g end",
}


def keyed_rows(spark: SparkSession) -> DataFrame:
    """Return 40 rows of four groups, with equal values that differ in their bits."""
    columns = [f"{expression} as `{name}`" for name, expression in KEYS.items()]
    rows = spark.range(40).selectExpr("id % 4 as g", "id").selectExpr("g", "id", *columns)
    upper = F.when(F.col("id") % 8 < 4, F.upper("cased")).otherwise(F.col("cased"))
    negative = F.when((F.col("g") == 0) & (F.col("id") % 8 < 4), F.lit(-0.0)).otherwise(F.col("number"))
    features = F.array(F.col("id").cast("float"), F.col("g").cast("float"))
    return rows.withColumns(
        {"cased": upper, "number": negative, "features": features, "label": (F.col("id") % 2).cast("float")}
    )


def trainer() -> Trainer:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(1e-3)
    return Trainer(model, "agn", worker_optimizer=optimizer, loss="mse", num_workers=1, batch_size=4)


@pytest.fixture
def zones(request: pytest.FixtureRequest, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the session's zone and the driver's."""
    session, driver = request.param
    before = spark.conf.get("spark.sql.session.timeZone")
    monkeypatch.setenv("TZ", driver)
    time.tzset()
    spark.conf.set("spark.sql.session.timeZone", session)
    yield
    spark.conf.set("spark.sql.session.timeZone", present(before))
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "zones",
    [
        pytest.param(("America/New_York", "America/New_York"), marks=pytest.mark.slow),
        pytest.param(("Asia/Kolkata", "America/New_York"), marks=pytest.mark.slow),
        pytest.param(("UTC", "Europe/Berlin"), marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_keys_of_every_type_are_those_of_spark(spark: SparkSession, zones: None) -> None:
    df = keyed_rows(spark)
    groups = trainer().train_groups(df, by=list(KEYS), rows_max=1000)
    table = groups.table.cache()
    assert table.dtypes[: len(KEYS)] == [(name, kind) for name, kind in df.dtypes if name in KEYS]
    assert [row["rows"] for row in table.collect()] == [10] * 4
    names = list(KEYS)
    same = F.lit(True)
    for name in names:
        same = same & df[name].eqNullSafe(table[name])
    found = df.join(table, same, "left").groupBy("g").agg(F.count_distinct(table["long"]), F.count("rows")).collect()
    assert sorted(tuple(row) for row in found) == [(number, 1, 10) for number in range(4)]
    fitted = KerasGroupModel(groups, features_col="features", prediction_col="p")
    predicted = {row["id"]: row["p"] for row in fitted.transform(df).select("id", "p").collect()}
    readable = table.drop("text", "bytes").where("whole != 1")
    for row in readable.select("whole").collect():
        number = row["whole"]
        one = df.where(F.col("g") == number).select(*names).first() if number != 1 else None
        assert one is not None
        model = groups.model(one)
        x = np.array([[number, number]], np.float32)
        assert predicted[number] == pytest.approx(float(model.predict(x, verbose=0)[0, 0]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zones", [("Asia/Kolkata", "America/New_York")], indirect=True)
@pytest.mark.parametrize("name", ["local", "moment", "cased", "number"])
def test_a_large_group_has_its_own_rows(spark: SparkSession, zones: None, name: str) -> None:
    df = keyed_rows(spark)
    groups = trainer().train_groups(df, by=name, rows_max=5)
    counts = sorted(row["rows"] for row in groups.table.collect())
    assert counts == sorted(row["count"] for row in df.groupBy(name).count().collect())
    alone = trainer().train_groups(df.where("g = 2"), by="g", rows_max=5).model(2).get_weights()
    ours = groups.model(df.where("g = 2").select(name).first()).get_weights()
    for one, other in zip(ours, alone, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("zones", [("UTC", "America/New_York")], indirect=True)
def test_a_key_is_found_by_what_spark_has_returned(spark: SparkSession, zones: None) -> None:
    df = keyed_rows(spark).select("g", "moment", "local", "list", "pair").distinct()
    fields = key_fields(df.schema, ["moment", "local", "list", "pair"], ())
    names = [field.name for field in fields]
    for row in df.collect():
        again = key_row(spark, fields, row)
        assert again.schema == T.StructType(fields)
        found = df.where(F.col("g") == row["g"]).select(*names).exceptAll(again).count()
        assert found == 0, row
    instant = datetime(2020, 11, 1, 6, 0, tzinfo=UTC)
    by_moment = key_row(spark, fields[:1], instant).select(F.unix_seconds("moment")).first()
    assert by_moment is not None
    assert by_moment[0] == int(instant.timestamp())


def test_invalid_keys_are_refused(spark: SparkSession) -> None:
    fields = [T.StructField("shop", T.StringType()), T.StructField("year", T.IntegerType())]
    with pytest.raises(ConfigurationError, match=r"`key` must be a mapping with a value for each of shop, year"):
        key_row(spark, fields, "s1")
    with pytest.raises(ConfigurationError, match=r"`key` must be a mapping with a value for each of shop, year"):
        key_row(spark, fields, {"shop": "s1"})
    with pytest.raises(ConfigurationError, match=r"`key` must be of the key's types: shop string, year int"):
        key_row(spark, fields, {"shop": "s1", "year": "2020"})
    assert key_row(spark, fields, Row(rows=3, shop="s1", year=np.int64(2020))).collect() == [("s1", 2020)]


@pytest.mark.parametrize("by", ["", [], ["shop", "shop"], 3, ["shop", ""]])
def test_columns_that_are_no_key_are_refused(by: Any) -> None:
    with pytest.raises(ConfigurationError, match="`by` must be the name of a column, or a list of distinct names"):
        key_names(by)


@pytest.mark.parametrize(
    "kind",
    [
        T.MapType(T.StringType(), T.LongType()),
        T.ArrayType(T.MapType(T.StringType(), T.LongType())),
        T.YearMonthIntervalType(),
        T.NullType(),
        T.VariantType(),
    ],
)
def test_types_that_spark_cannot_compare_or_send_are_refused(kind: T.DataType) -> None:
    schema = T.StructType([T.StructField("shop", kind)])
    with pytest.raises(ColumnTypeError, match="`by` must name columns that Spark compares and sends to Python"):
        key_fields(schema, ["shop"], ())


def test_names_that_spark_would_confuse_are_refused() -> None:
    schema = T.StructType([T.StructField(name, T.LongType(), False) for name in ("shop", "Rows", "SHOP")])
    with pytest.raises(ConfigurationError, match="must not name a column that the result has: rows"):
        key_fields(schema, ["Rows"], ["rows"])
    with pytest.raises(ConfigurationError, match="must not name a column that the result has"):
        key_fields(schema, ["shop", "SHOP"], ["rows"])
    with pytest.raises(MissingColumnError, match="'store'"):
        key_fields(schema, ["store"], ["rows"])
    assert [field.nullable for field in key_fields(schema, ["shop"], ["rows"])] == [True]


def test_functions_of_sql_compare_instants_and_bytes() -> None:
    hour = 3_600_000_000
    instants = pa.array([1604206800000000, 1604206800000000 + hour, None], pa.timestamp("us", "America/New_York"))
    texts = pa.array([b"\xff", b"a", b"a"], pa.binary()).cast(pa.string(), safe=False)
    assert len(set(plain_keys([instants]))) == 3
    assert plain_keys([texts])[1:] == [(b"a",), (b"a",)]
    with pytest.raises(ColumnTypeError, match="`transform` takes keys of every type"):
        require_plain([T.StructField("shop", T.DoubleType())])
