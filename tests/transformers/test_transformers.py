"""Transformers as JVM expressions: values, nulls, shapes, errors, persistence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from pyspark.errors import PySparkException
from pyspark.ml import PipelineModel, Transformer
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from distkeras.ps.errors import (
    BadValueError,
    ColumnTypeError,
    ConfigurationError,
    DistkerasError,
    EmptyDataError,
    MissingColumnError,
    ShapeError,
)
from distkeras.transformers import (
    DenseTransformer,
    LabelIndexTransformer,
    MinMaxTransformer,
    OneHotTransformer,
    ReshapeTransformer,
    StandardScaleTransformer,
)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """Return a DataFrame with every kind of column and a row of nulls."""
    schema = (
        "id int, whole int, number double, pixels array<int>, reals array<double>, "
        "grid array<array<float>>, word string"
    )
    data = [
        (0, 0, 0.0, [0, 255], [0.0, 1.0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "a"),
        (1, 2, 5.0, [51, 102], [2.0, 0.5], [[0.0] * 3] * 2, "b"),
        (2, None, None, None, None, None, None),
    ]
    plain = spark.createDataFrame(data, schema).repartition(3)
    vectors = spark.createDataFrame(
        [(0, Vectors.dense([0.0, 10.0])), (1, Vectors.sparse(2, {1: 5.0})), (2, None)], ["id", "vector"]
    )
    return plain.join(vectors, "id").cache()


def column(df: DataFrame, name: str) -> list[Any]:
    return [row[name] for row in df.orderBy("id").select(name).collect()]


def assert_job_raises(df: DataFrame, kind: type[DistkerasError]) -> None:
    with pytest.raises(PySparkException, match=rf"distkeras\.ps\.errors\.{kind.__name__}: "):
        df.collect()


@pytest.mark.parametrize(
    ("name", "o_max", "expected"),
    [
        ("pixels", 255, [[-1.0, 1.0], pytest.approx([-0.6, -0.2]), None]),
        pytest.param("reals", 2, [[-1.0, 0.0], [1.0, -0.5], None], marks=pytest.mark.slow),
        pytest.param("vector", 10, [DenseVector([-1, 1]), DenseVector([-1, 0]), None], marks=pytest.mark.slow),
        pytest.param("number", 10, [-1.0, 0.0, None], marks=pytest.mark.slow),
        pytest.param("whole", 2, [-1.0, 1.0, None], marks=pytest.mark.slow),
    ],
)
def test_min_max_maps_one_range_to_another(rows: DataFrame, name: str, o_max: float, expected: list[Any]) -> None:
    out = MinMaxTransformer(n_min=-1, n_max=1, o_min=0, o_max=o_max, input_col=name, output_col="y").transform(rows)
    assert column(out, "y") == expected
    assert out.columns == [*rows.columns, "y"]
    kind = {"vector": "vector", "reals": "array<double>", "pixels": "array<float>", "whole": "float"}
    assert out.schema["y"].dataType.simpleString() == kind.get(name, "double")


def test_the_ends_of_a_range_map_exactly(spark: SparkSession) -> None:
    out = MinMaxTransformer(0.3, 1.1, 0.1, 0.7, "x", "y").transform(spark.createDataFrame([(0.3,), (1.1,)], "x double"))
    assert [row.y for row in out.collect()] == [0.1, 0.7]


def test_one_hot_encodes_classes(rows: DataFrame) -> None:
    out = OneHotTransformer(3, input_col="whole", output_col="y").transform(rows)
    assert column(out, "y") == [DenseVector([1, 0, 0]), DenseVector([0, 0, 1]), None]
    arrays = OneHotTransformer(3, input_col="whole", output_col="y", output_type="array").transform(rows)
    assert column(arrays, "y") == [[1, 0, 0], [0, 0, 1], None]
    assert arrays.schema["y"].dataType.simpleString() == "array<float>"


@pytest.mark.parametrize(
    "label", [3.0, *(pytest.param(label, marks=pytest.mark.slow) for label in (-1.0, 0.5, math.nan))]
)
def test_one_hot_refuses_a_label_that_is_not_a_class(spark: SparkSession, label: float) -> None:
    df = spark.createDataFrame([(label,)], "x double")
    assert_job_raises(OneHotTransformer(3, "x", "y").transform(df), BadValueError)


def test_label_index_takes_the_largest_score(spark: SparkSession) -> None:
    data = [(0, [0.1, 0.7, 0.7]), (1, [3.0, -1.0, 2.0]), (2, None)]
    df = spark.createDataFrame(data, "id int, prediction array<float>")
    out = LabelIndexTransformer(output_dim=3).transform(df)
    assert column(out, "prediction_index") == [1.0, 0.0, None]
    assert out.schema["prediction_index"].dataType.simpleString() == "double"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("number", "array")), "vector"]
)
def test_a_single_score_is_compared_with_the_threshold(spark: SparkSession, kind: str) -> None:
    wraps: dict[str, Callable[[float], Any]] = {
        "number": float,
        "array": lambda v: [v],
        "vector": lambda v: Vectors.dense([v]),
    }
    wrap = wraps[kind]
    df = spark.createDataFrame([(0, wrap(0.54)), (1, wrap(0.55))], ["id", "prediction"])
    assert column(LabelIndexTransformer(activation_threshold=0.55).transform(df), "prediction_index") == [0, 1]
    assert column(LabelIndexTransformer().transform(df), "prediction_index") == [1, 1]


@pytest.mark.parametrize(
    ("scores", "kind"),
    [
        ([0.1, math.nan], BadValueError),
        pytest.param([0.1, None], BadValueError, marks=pytest.mark.slow),
        pytest.param([], ShapeError, marks=pytest.mark.slow),
        pytest.param([0.1, 0.2, 0.3], ShapeError, marks=pytest.mark.slow),
    ],
)
def test_label_index_refuses_invalid_scores(spark: SparkSession, scores: list[Any], kind: type[DistkerasError]) -> None:
    df = spark.createDataFrame([(scores,)], "prediction array<double>")
    assert_job_raises(LabelIndexTransformer(output_dim=2).transform(df), kind)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        pytest.param("grid", (6,), [1, 2, 3, 4, 5, 6], marks=pytest.mark.slow),
        pytest.param("grid", (3, 2), [[1, 2], [3, 4], [5, 6]], marks=pytest.mark.slow),
        pytest.param("grid", (1, 3, 2, 1), [[[[1], [2]], [[3], [4]], [[5], [6]]]], marks=pytest.mark.slow),
        pytest.param("grid", (-1, 2), [[1, 2], [3, 4], [5, 6]], marks=pytest.mark.slow),
        pytest.param("grid", (2, -1), [[1, 2, 3], [4, 5, 6]], marks=pytest.mark.slow),
        pytest.param("vector", (2, 1), [[0], [10]], marks=pytest.mark.slow),
        ("pixels", (1, 2), [[0, 255]]),
    ],
)
def test_reshape_returns_nested_arrays(rows: DataFrame, name: str, shape: tuple[int, ...], expected: list[Any]) -> None:
    values = column(ReshapeTransformer(name, "y", shape).transform(rows), "y")
    assert values[0] == expected
    assert values[2] is None


@pytest.mark.parametrize(
    "shape", [(4,), pytest.param((4, 2), marks=pytest.mark.slow), pytest.param((-1, 4), marks=pytest.mark.slow)]
)
def test_reshape_refuses_values_that_do_not_fill_the_shape(rows: DataFrame, shape: tuple[int, ...]) -> None:
    assert_job_raises(ReshapeTransformer("grid", "y", shape).transform(rows), ShapeError)


@pytest.mark.slow
def test_dense_returns_dense_vectors(rows: DataFrame) -> None:
    assert isinstance(column(rows, "vector")[1], SparseVector)
    values = column(DenseTransformer("vector", "y").transform(rows), "y")
    assert [type(value) for value in values] == [DenseVector, DenseVector, type(None)]
    assert list(values[1]) == [0, 5]


def test_standardize_subtracts_the_mean_and_divides_by_the_deviation(spark: SparkSession, rows: DataFrame) -> None:
    values = np.random.default_rng(0).normal(3, 2, (50, 3)) * [1, 10, 0]
    data = [(i, Vectors.dense(v), v.tolist(), float(v[0])) for i, v in enumerate(values)]
    df = spark.createDataFrame([*data, (50, None, None, None)], ["id", "v", "a", "n"]).repartition(3)
    scaler = StandardScaleTransformer(["v", "a", "n"]).fit(df)
    out = scaler.transform(df)
    assert out.columns == ["id", "v", "a", "n", "v_normalized", "a_normalized", "n_normalized"]
    deviation = values.std(axis=0, ddof=1)
    expected = (values - values.mean(axis=0)) / np.where(deviation, deviation, 1)
    *vectors, null = column(out, "v_normalized")
    assert null is None
    np.testing.assert_allclose([v.toArray() for v in vectors], expected, atol=1e-12)
    np.testing.assert_allclose(column(out, "a_normalized")[:-1], expected, atol=1e-12)
    np.testing.assert_allclose(column(out, "n_normalized")[:-1], expected[:, 0], atol=1e-12)
    # The moments of the training data apply to other data; without them each DataFrame has its own.
    assert column(scaler.transform(df.limit(1)), "n_normalized") != [0.0]
    assert column(StandardScaleTransformer(["n"]).transform(df.where("id = 3")), "n_normalized") == [0.0]


@pytest.mark.slow
def test_standardize_refuses_data_without_moments(spark: SparkSession) -> None:
    df = spark.createDataFrame([(0, 1.0, [1.0]), (1, math.nan, [1.0, 2.0])], "id int, n double, a array<double>")
    with pytest.raises(EmptyDataError):
        StandardScaleTransformer(["n"]).fit(df.limit(0))
    with pytest.raises(EmptyDataError):
        StandardScaleTransformer(["a"]).fit(df.limit(0))
    with pytest.raises(BadValueError, match="n"):
        StandardScaleTransformer(["n"]).fit(df)
    with pytest.raises(ShapeError):
        StandardScaleTransformer(["a"]).fit(df)
    fixed = StandardScaleTransformer(["a"], means=[[0.0]], stddevs=[[1.0]])
    assert_job_raises(fixed.transform(df), ShapeError)


STAGES = [
    MinMaxTransformer(o_min=0, o_max=1, input_col="whole", output_col="y"),
    OneHotTransformer(3, "whole", "y"),
    LabelIndexTransformer(input_col="reals", output_col="y"),
    ReshapeTransformer("reals", "y", (2, 1)),
    DenseTransformer("vector", "y"),
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: type(stage).__name__)
def test_columns_are_checked_before_any_job(rows: DataFrame, stage: Any) -> None:
    with pytest.raises(MissingColumnError, match="'nowhere'"):
        stage.copy({stage.input_col: "nowhere"}).transform(rows)
    with pytest.raises(ColumnTypeError, match="string"):
        stage.copy({stage.input_col: "word"}).transform(rows)
    with pytest.raises(ConfigurationError, match="`output_col` must name a new column"):
        stage.copy({stage.output_col: "ID"}).transform(rows)
    with pytest.raises(ConfigurationError, match="`output_col` must be"):
        stage.copy({stage.output_col: ""})
    bare = type(stage)()
    if not bare.hasDefault("input_col"):
        with pytest.raises(ConfigurationError, match="must be set"):
            bare.transform(rows)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: type(stage).__name__)
def test_an_empty_dataframe_is_transformed_to_an_empty_one(rows: DataFrame, stage: Any) -> None:
    out = stage.transform(rows.limit(0))
    assert out.collect() == []
    assert out.columns[-1] == "y"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneHotTransformer(0), "`output_dim` must be a positive integer"),
        (lambda: OneHotTransformer(True), "`output_dim` must be a positive integer"),
        (lambda: ReshapeTransformer(shape=(-1, -1)), "`shape` must be"),
        (lambda: ReshapeTransformer(shape=(0,)), "`shape` must be"),
        (lambda: ReshapeTransformer(shape=()), "`shape` must be"),
        (lambda: MinMaxTransformer(n_min=math.inf), "`n_min` must be a finite number"),
        (lambda: MinMaxTransformer(is_vector=cast("Any", 1)), "`is_vector` must be True or False"),
        (lambda: OneHotTransformer(output_type="list"), '`output_type` must be one of "array", "vector"'),
        (lambda: StandardScaleTransformer(["a", "a"]), "`columns` must be"),
        (lambda: StandardScaleTransformer(["a"], means=cast("Any", [["x"]])), "`means` must be"),
    ],
)
def test_an_invalid_value_is_refused_when_it_is_set(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    "stage",
    [
        MinMaxTransformer(o_min=1, o_max=1, input_col="whole", output_col="y"),
        MinMaxTransformer(0, 1, 1, 0, "whole", "y"),
        MinMaxTransformer(0, 1, 0, 1, "whole", "y", is_vector=True),
        MinMaxTransformer(0, 1, 0, 1, "reals", "y", is_vector=False),
        MinMaxTransformer(o_min=0, o_max=1, input_col="grid", output_col="y"),
        MinMaxTransformer(input_col="whole", output_col="y"),
        OneHotTransformer(3, "reals", "y"),
        LabelIndexTransformer(input_col="grid"),
        ReshapeTransformer("whole", "y", (1,)),
        DenseTransformer("reals", "y"),
        StandardScaleTransformer(["whole"], means=[[0.0]]),
        StandardScaleTransformer(["whole"], means=[[0.0]], stddevs=[[1.0, 2.0]]),
        StandardScaleTransformer(["whole"], means=[[0.0, 0.0]], stddevs=[[1.0, 2.0]]),
        StandardScaleTransformer(["whole"], means=[[0.0]], stddevs=[[-1.0]]),
    ],
)
def test_stages_that_do_not_fit_the_data_are_refused(rows: DataFrame, stage: Any) -> None:
    with pytest.raises(ConfigurationError):
        stage.transform(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.b` c"])
def test_names_may_have_dots_backticks_and_spaces(spark: SparkSession, name: str) -> None:
    df = spark.createDataFrame([(1.0,)], "x double").toDF(name)
    out = MinMaxTransformer(o_min=0, o_max=2, input_col=name, output_col=f"{name}2").transform(df)
    assert out.collect()[0][f"{name}2"] == 0.5
    scaled = StandardScaleTransformer([name]).transform(df)
    assert scaled.collect()[0][f"{name}_normalized"] == 0.0


def test_a_pipeline_is_saved_and_loaded(rows: DataFrame, tmp_path: Path) -> None:
    stages: list[Transformer] = [
        MinMaxTransformer(o_min=0, o_max=255, input_col="pixels", output_col="scaled"),
        OneHotTransformer(3, "whole", "hot", output_type="array"),
        LabelIndexTransformer(3, "hot", "index"),
        ReshapeTransformer("scaled", "shaped", (2, 1)),
        DenseTransformer("vector", "dense"),
        StandardScaleTransformer(["number"]).fit(rows),
    ]
    before = PipelineModel(stages).transform(rows)
    PipelineModel(stages).write().save(str(tmp_path / "model"))
    after = PipelineModel.load(str(tmp_path / "model")).transform(rows)
    assert after.schema == before.schema
    assert after.orderBy("id").collect() == before.orderBy("id").collect()
    assert column(before.where(F.col("whole").isNotNull()), "index") == column(rows, "whole")[:2]


def test_names_that_differ_by_case_alone_follow_sparks_setting(spark: SparkSession) -> None:
    df = spark.createDataFrame([(1, "s")], "number int, Label string")
    stage = OneHotTransformer(2, "number", "label")
    with pytest.raises(ConfigurationError, match=r"spark\.sql\.caseSensitive"):
        stage.transform(df)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert stage.transform(df).columns == ["number", "Label", "label"]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
