"""Class weights: the labels that they are allowed for, and the weight of each row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.data.schema import CLASS_WEIGHT, require_class_weight, require_classes, weighted
from distkeras.ps.errors import ConfigurationError

X = Column("x")


def spec(*labels: Column, classes: int | None = None) -> DataSpec:
    return DataSpec((X,), tuple(replace(label, classes=classes) for label in labels))


@pytest.mark.parametrize(
    ("labels", "classes", "text"),
    [
        ([Column("y"), Column("z")], 3, "one label column"),
        ([Column("y", (5,))], 3, "one class a row"),
        ([Column("y", (5, 3))], None, "one class a row"),
        ([Column("y", (None,))], 3, "one class a row"),
        ([Column("y")], 2, r"classes in \[0, 2\).*Received: \[2\]"),
        ([Column("y", (2,))], None, r"classes in \[0, 2\).*Received: \[2\]"),
    ],
)
def test_class_weights_are_refused_for_labels_that_are_not_one_class_per_row(
    labels: list[Column], classes: int | None, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"`class_weight`.*{text}"):
        require_classes({0: 1.0, 2: 3.0}, spec(*labels, classes=classes))


@pytest.mark.parametrize(("label", "classes"), [(Column("y"), 3), (Column("y", (3,)), None), (Column("y", (1,)), None)])
def test_class_weights_are_accepted_for_labels_of_one_class_per_row(label: Column, classes: int | None) -> None:
    require_classes({0: 1.0, 2: 3.0}, spec(label, classes=classes))


def test_keys_may_be_numpy_integers() -> None:
    assert require_class_weight({np.int64(1): np.float32(2)}) == {1: 2.0}


def test_each_kind_of_label_has_its_weight(spark: SparkSession) -> None:
    schema = T.StructType().add("class", "integer").add("double", "double").add("bit", "boolean")
    schema = schema.add("hot", T.ArrayType(T.FloatType())).add("vector", VectorUDT())
    schema = schema.add("nested", T.ArrayType(T.ArrayType(T.IntegerType())))
    rows: list[Any] = [
        (0, 0.0, False, [1.0, 0.0], Vectors.dense(1, 0), [[0]]),
        (1, 1.0, True, [0.0, 1.0], Vectors.sparse(2, [1], [1.0]), [[1]]),
        (None,) * 6,
        (0, 0.0, False, [], Vectors.dense(), []),
    ]
    df = spark.createDataFrame(rows, schema)
    for label in schema.names:
        df = weighted(df, label, {1: 5.0}, None).withColumnRenamed(CLASS_WEIGHT, f"weight of {label}")
    for row, expected in zip(df.collect(), (1.0, 5.0, 1.0, 1.0), strict=True):
        assert [row[f"weight of {label}"] for label in schema.names] == [expected] * 6


@pytest.mark.parametrize("name", ["a.b", "a`b", "with space"])
def test_a_label_and_a_weight_may_have_any_name(spark: SparkSession, name: str) -> None:
    df = spark.createDataFrame([(0, 2.0), (1, 3.0)], [name, f"{name}'s weight"])
    found = weighted(df, name, {1: 10.0}, f"{name}'s weight").collect()
    assert sorted(row[CLASS_WEIGHT] for row in found) == [2.0, 30.0]


def test_no_column_of_the_caller_is_overwritten(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match=f"no column may have the name '{CLASS_WEIGHT}'"):
        weighted(spark.createDataFrame([(0, 1.0)], ["y", CLASS_WEIGHT]), "y", {1: 5.0}, None)
