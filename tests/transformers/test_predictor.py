"""`ModelPredictor`: its predictions are those of Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.errors import PySparkException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from support.present import present

from distkeras.data.schema import quoted
from distkeras.keras_model import mapped_tables
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, DistkerasError, MissingColumnError
from distkeras.transformers import LabelIndexTransformer, ModelPredictor, files, predictor

N = 53
X = np.random.default_rng(2).normal(size=(N, 4)).astype("float32")


@pytest.fixture(scope="module")
def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(3, "softmax")]
    return keras.Sequential(layers)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """Return features and columns of many types, in three partitions of uneven size, one of them empty."""
    data = [
        (
            i,
            X[i].tolist(),
            Vectors.dense(X[i]) if i % 3 else Vectors.sparse(4, range(4), X[i]),
            f"row {i}" if i % 5 else None,
            {"key": i},
            [[i], []],
        )
        for i in range(N)
    ]
    schema = "id int, features array<float>, vector vector, text string, map map<string,int>, deep array<array<int>>"
    names = [part.split()[0] for part in schema.split(", ")]
    df = spark.createDataFrame(data, names)
    df = df.withColumn("features", F.col("features").cast("array<float>"))
    df = df.withColumn("id", F.col("id").cast("int"))
    return df.repartitionByRange(3, "id").withColumn("when", F.lit("2020-02-02").cast("timestamp")).cache()


# Older versions of PySpark have only the second way; with newer versions, one default test uses it.
@pytest.fixture(
    params=["function", pytest.param("python", marks=() if predictor.arrow_udf is None else pytest.mark.slow)]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select how rows reach the model: a function of the features (PySpark 4.1 or newer), or whole rows in Python."""
    if request.param == "python":
        monkeypatch.setattr(predictor, "arrow_udf", None)
    elif predictor.arrow_udf is None:
        pytest.skip("PySpark is older than 4.1")


def values(df: DataFrame, name: str = "prediction") -> np.ndarray:
    return np.array([row[name] for row in df.orderBy("id").select(quoted(name)).collect()])


def towers() -> keras.Model:
    keras.utils.set_random_seed(0)
    ids, numbers = keras.Input((1,), dtype="int32"), keras.Input((4,))
    row = keras.layers.Flatten()(keras.layers.Embedding(300, 8, name="users")(ids))
    hidden = keras.layers.Dense(5, "tanh")(keras.layers.Concatenate()([row, numbers]))
    return keras.Model([ids, numbers], keras.layers.Dense(3)(hidden))


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_wide_tables_stay_in_files(rows: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = ModelPredictor(towers(), ["id", "features"])
    monkeypatch.setattr(mapped_tables, "FILE_BYTES_MIN", 300 * 8 * 4)
    mapped = ModelPredictor(towers(), ["id", "features"])
    np.testing.assert_array_equal(values(mapped.transform(rows)), values(ordinary.transform(rows)))
    beyond = rows.withColumn("id", F.lit(300))
    with pytest.raises(PySparkException, match=r"ids of 'users' must be in \[0, 300\), its rows. Received: 300"):
        mapped.transform(beyond).collect()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["function", pytest.param("python", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize(
    ("column", "batch_size"),
    [
        pytest.param("features", 1, marks=pytest.mark.slow),
        pytest.param("features", 1024, marks=pytest.mark.slow),
        ("vector", 7),
    ],
)
def test_predictions_are_those_of_keras(rows: DataFrame, model: keras.Model, column: str, batch_size: int) -> None:
    out = ModelPredictor(model, features_col=column, batch_size=batch_size).transform(rows)
    assert out.schema["prediction"].dataType.simpleString() == "array<float>"
    np.testing.assert_allclose(values(out), model.predict_on_batch(X), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("way")
def test_all_other_columns_and_rows_are_kept_in_order(rows: DataFrame, model: keras.Model) -> None:
    out = ModelPredictor(model, output_col="p", batch_size=8).transform(rows)
    assert out.columns == [*rows.columns, "p"]
    assert out.drop("p").schema == rows.schema
    assert out.drop("p").collect() == rows.collect()


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("column", "output_type"), [pytest.param("features", "array", marks=pytest.mark.slow), ("vector", "vector")]
)
def test_a_table_in_parquet_is_predicted(
    rows: DataFrame, model: keras.Model, tmp_path: Path, column: str, output_type: str
) -> None:
    """Spark reads such a table in columnar batches, including vectors."""
    rows.write.parquet(str(tmp_path / "rows"))
    table = rows.sparkSession.read.parquet(str(tmp_path / "rows"))
    out = ModelPredictor(model, features_col=column, output_type=output_type).transform(table)
    np.testing.assert_allclose(values(out), model.predict_on_batch(X), rtol=1e-5, atol=1e-6)
    assert out.drop("prediction").orderBy("id").collect() == rows.orderBy("id").collect()


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_empty_partitions_and_dataframes_are_predicted(
    spark: SparkSession, rows: DataFrame, model: keras.Model
) -> None:
    stage = ModelPredictor(model)
    few = rows.select("id", "features").where("id < 2").union(rows.select("id", "features").limit(0))
    np.testing.assert_allclose(values(stage.transform(few)), model.predict_on_batch(X[:2]), rtol=1e-5)
    assert stage.transform(rows.limit(0)).collect() == []


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_small_arrow_batches_are_joined(spark: SparkSession, rows: DataFrame, model: keras.Model) -> None:
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "3")
    try:
        out = ModelPredictor(model, batch_size=8).transform(rows)
        np.testing.assert_allclose(values(out), model.predict_on_batch(X), rtol=1e-5, atol=1e-6)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def branched(named: bool) -> keras.Model:
    """Return a model of two inputs and two outputs: the second input is of integers, the first output is a grid."""
    first, second = keras.Input((4,), name="z"), keras.Input((), name="a", dtype="int32")
    embedded = keras.layers.Embedding(60, 4)(second)
    grid = keras.layers.Reshape((2, 2))(keras.layers.Add()([first, embedded]))
    total = keras.layers.Dense(1)(first)
    if named:
        return keras.Model({"z": first, "a": second}, {"out": grid, "also": total})
    return keras.Model([first, second], [grid, total])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("named", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_of_several_inputs_and_outputs_predicts(rows: DataFrame, named: bool) -> None:
    model = branched(named)
    ids = np.arange(N, dtype="int32")
    if named:
        columns = {"z": "features", "a": "id"}
        stage = ModelPredictor(model, features_col=columns, output_col={"out": "grid", "also": "total"})
        expected = model.predict_on_batch({"z": X, "a": ids})
        grid, total = expected["out"], expected["also"]
    else:
        stage = ModelPredictor(model, features_col=["features", "id"], output_col=["grid", "total"])
        grid, total = model.predict_on_batch([X, ids])
    out = stage.transform(rows)
    assert out.schema["grid"].dataType.simpleString() == "array<array<float>>"
    np.testing.assert_allclose(values(out, "grid"), grid, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values(out, "total"), total, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_several_outputs_may_be_vectors(rows: DataFrame) -> None:
    x = keras.Input((4,))
    model = keras.Model(x, [keras.layers.Dense(3)(x), keras.layers.Dense(1)(x)])
    out = ModelPredictor(model, output_col=["a", "b"], output_type="vector").transform(rows)
    assert [out.schema[name].dataType for name in ("a", "b")] == [VectorUDT()] * 2
    expected = model.predict_on_batch(X)
    for name, output in zip(("a", "b"), expected, strict=True):
        found = [row[name].toArray() for row in out.orderBy("id").select(name).collect()]
        np.testing.assert_allclose(found, output, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("way")
def test_each_row_is_predicted_once(rows: DataFrame, model: keras.Model, tmp_path: Path) -> None:
    """A filter on the prediction and values computed from it do not repeat the prediction."""
    decoded = tmp_path / "decoded"

    def noted(value: Any) -> Any:
        with decoded.open("a") as file:
            file.write(".")
        return value

    out = ModelPredictor(model, decode=noted).transform(rows)
    first, second = out["prediction"][0], out["prediction"][1]
    high = out.where(first > 0.33).withColumn("sum", first + second)
    expected = model.predict_on_batch(X)
    assert len(high.select("sum", "prediction").collect()) == int((expected[:, 0] > 0.33).sum()) > 0
    assert len(decoded.read_text()) == N


@pytest.mark.slow
def test_an_open_extent_is_that_of_the_data(spark: SparkSession) -> None:
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, keras.ops.mean(keras.layers.Embedding(10, 2)(tokens), axis=(1, 2)))
    data = np.random.default_rng(0).integers(0, 10, (6, 5))
    df = spark.createDataFrame([(i, row.tolist()) for i, row in enumerate(data)], "id int, features array<int>")
    out = ModelPredictor(model).transform(df)
    assert out.schema["prediction"].dataType.simpleString() == "float"
    np.testing.assert_allclose(values(out), model.predict_on_batch(data), rtol=1e-5)


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        (None, "BadValueError", "null"),
        pytest.param([1.0, None, 1.0, 1.0], "BadValueError", "null", marks=pytest.mark.slow),
        pytest.param([1.0, float("nan"), 1.0, 1.0], "BadValueError", "nan", marks=pytest.mark.slow),
        pytest.param([1.0, 2.0], "ShapeError", "2 values", marks=pytest.mark.slow),
    ],
)
def test_the_error_for_an_invalid_feature_names_the_column(
    spark: SparkSession, model: keras.Model, features: list[Any] | None, error: str, message: str
) -> None:
    good = [0.0] * 4
    df = spark.createDataFrame([(good,), (good,), (features,)], "features array<float>").coalesce(1)
    with pytest.raises(PySparkException) as caught:
        ModelPredictor(model).transform(df).collect()
    text = str(caught.value)
    assert f"distkeras.ps.errors.{error}" in text
    assert message in text
    assert "row 2" in text
    assert "column 'features'" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(None, marks=pytest.mark.slow),
        Vectors.dense([1.0, 2.0]),
        pytest.param(Vectors.sparse(9, {8: 1.0}), marks=pytest.mark.slow),
    ],
)
def test_the_error_for_an_invalid_vector_names_the_column(
    spark: SparkSession, model: keras.Model, broken: object
) -> None:
    df = spark.createDataFrame([(Vectors.dense([0.0] * 4),), (broken,)], ["features"]).coalesce(1)
    with pytest.raises(PySparkException, match=r"distkeras\.ps\.errors\.(BadValue|Shape)Error.*row 1.*'features'"):
        ModelPredictor(model).transform(df).collect()


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"features_col": "nowhere"}, MissingColumnError, "'nowhere'"),
        ({"features_col": "text"}, ColumnTypeError, "string"),
        (
            {"features_col": ["features", "id"]},
            ConfigurationError,
            "`features_col` must name a column for each of the 1 inputs",
        ),
        ({"output_col": ["a", "b"]}, ConfigurationError, "`output_col` must name a column for each of the 1 outputs"),
        ({"output_col": "Text"}, ConfigurationError, "`output_col` must name a new column"),
        ({"batch_size": 0}, ConfigurationError, "`batch_size` must be a positive integer"),
        ({"features_col": []}, ConfigurationError, "`features_col` must be"),
        ({"keras_model": "model"}, ConfigurationError, "`keras_model` must be a keras.Model"),
        ({"keras_model": None}, ConfigurationError, "`keras_model` must be set"),
    ],
)
def test_invalid_arguments_are_refused_before_any_job(
    rows: DataFrame, model: keras.Model, keywords: dict[str, Any], kind: type[DistkerasError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ModelPredictor(**{"keras_model": model, **keywords}).transform(rows)


class WithoutInput(keras.Model):
    def build(self, shape: tuple[int | None, ...]) -> None:
        self.built = True

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return x


def test_models_whose_inputs_have_no_shape_are_refused() -> None:
    model = WithoutInput()
    model.build((None, 4))
    scope = keras.saving.custom_object_scope({"WithoutInput": WithoutInput})
    with scope, pytest.raises(ConfigurationError, match="Functional or Sequential"):
        ModelPredictor(model)
    layers = [keras.layers.Input((None, None, 3)), keras.layers.GlobalAveragePooling2D()]
    with pytest.raises(ConfigurationError, match="at most one extent"):
        ModelPredictor(keras.Sequential(layers))


@pytest.mark.slow
def test_later_training_does_not_change_a_predictor(rows: DataFrame, model: keras.Model) -> None:
    own = keras.models.clone_model(model)
    own.compile("adam", "mse")
    own.train_on_batch(X, np.zeros((N, 3)))
    stage, expected = ModelPredictor(own), own.predict_on_batch(X)
    own.set_weights([0 * w for w in own.get_weights()])
    np.testing.assert_allclose(values(stage.transform(rows)), expected, rtol=1e-5, atol=1e-6)
    assert not stage.keras_model.compiled


def test_custom_layers_of_a_notebook_reach_the_workers(rows: DataFrame) -> None:
    space: dict[str, Any] = {"__name__": "__main__", "keras": keras}
    exec(
        "@keras.saving.register_keras_serializable('notebook')\n"
        "class Doubled(keras.layers.Layer):\n"
        "    def call(self, x): return 2.0 * x\n",
        space,
    )
    stage = ModelPredictor(keras.Sequential([keras.layers.Input((4,)), space["Doubled"]()]))
    np.testing.assert_allclose(values(stage.transform(rows)), 2 * X)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_columns_may_have_any_name(rows: DataFrame, model: keras.Model) -> None:
    name = "a.b`c d"
    df = rows.select("id", rows["features"].alias(name))
    out = ModelPredictor(model, features_col=name, output_col=f"{name}?").transform(df)
    assert out.columns == ["id", name, f"{name}?"]
    np.testing.assert_allclose(values(out, f"{name}?"), model.predict_on_batch(X), rtol=1e-5, atol=1e-6)


def test_a_worker_loads_a_model_once(rows: DataFrame, model: keras.Model, tmp_path: Path) -> None:
    """Each load writes a file; later jobs reuse the model of their Python worker."""
    log = str(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__", "keras": keras, "log": log}
    exec(
        "@keras.saving.register_keras_serializable('notebook')\n"
        "class Counted(keras.layers.Layer):\n"
        "    def __init__(self, log, **keywords):\n"
        "        super().__init__(**keywords)\n"
        "        import os, tempfile\n"
        "        self.log = log\n"
        "        os.close(tempfile.mkstemp(prefix=f'{os.getpid()}-', dir=log)[0])\n"
        "    def get_config(self): return {**super().get_config(), 'log': self.log}\n"
        "    def call(self, x): return x\n",
        space,
    )
    stage = ModelPredictor(keras.Sequential([keras.layers.Input((4,)), space["Counted"](log)]))
    for path in tmp_path.iterdir():
        path.unlink()
    for _ in range(3):
        stage.transform(rows).write.format("noop").mode("overwrite").save()
    workers = [path.name.split("-")[0] for path in tmp_path.iterdir()]
    assert 1 <= len(workers) == len(set(workers))


@pytest.mark.slow
def test_large_models_are_broadcast(rows: DataFrame, model: keras.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "_INLINE_BYTES", 1)
    stage = ModelPredictor(model)
    for _ in range(2):
        np.testing.assert_allclose(values(stage.transform(rows)), model.predict_on_batch(X), rtol=1e-5, atol=1e-6)
    archives = [stage.packed_model.archive_reader(rows.sparkSession) for _ in range(2)]
    assert archives[0] is archives[1]


@pytest.mark.slow
def test_a_pipeline_is_saved_and_loaded(
    rows: DataFrame, model: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK_BYTES", 1000)
    stages = [ModelPredictor(model, batch_size=16, output_col="scores"), LabelIndexTransformer(3, "scores", "y")]
    Pipeline(stages=[*stages]).write().overwrite().save(str(tmp_path / "pipeline"))
    fitted = Pipeline.load(str(tmp_path / "pipeline")).fit(rows)
    fitted.write().save(str(tmp_path / "model"))
    again = PipelineModel.load(str(tmp_path / "model"))
    assert again.stages[0].uid == stages[0].uid
    assert again.stages[0].getOrDefault("batch_size") == 16
    out = again.transform(rows)
    np.testing.assert_array_equal(values(out, "y"), model.predict_on_batch(X).argmax(axis=1))
    with pytest.raises(ConfigurationError, match="`keras_model` must be set"):
        ModelPredictor().write().save(str(tmp_path / "empty"))


def test_custom_objects_need_not_be_registered(spark: SparkSession) -> None:
    class Tripled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return 3.0 * x

    model = keras.Sequential([keras.Input((2,)), Tripled()])
    with pytest.raises(ConfigurationError, match=r"`model` must consist of .* name them in `custom_objects`"):
        ModelPredictor(model)
    with pytest.raises(ConfigurationError, match="`custom_objects` must be a dictionary"):
        ModelPredictor(model, custom_objects=[Tripled])  # type: ignore[arg-type]  # the test passes a wrong type
    predictor = ModelPredictor(model, custom_objects={"Tripled": Tripled})
    assert keras.ops.convert_to_numpy(predictor.keras_model(np.ones((1, 2)))).tolist() == [[3.0, 3.0]]
    rows = spark.createDataFrame([([1.0, 2.0],)], "features array<float>")
    assert present(predictor.transform(rows).first())["prediction"] == [3.0, 6.0]


def of_texts(shape: tuple[int, ...]) -> keras.Model:
    """Return a model of texts and two numbers, whose output is both, as numbers."""
    words = keras.layers.TextVectorization(output_sequence_length=2, vocabulary=["cat", "dog"])
    text, numbers = keras.Input(shape, dtype="string"), keras.Input((2,))
    return keras.Model([text, numbers], keras.ops.cast(words(text), "float32") + numbers)


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="TensorFlow has strings")
def test_texts_are_refused_on_a_backend_without_strings(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("a cat", [1.0, 2.0])], "words string, two array<double>")
    predictor = ModelPredictor(of_texts(()), features_col=["words", "two"])
    name, backend = predictor.keras_model.inputs[0].name, keras.backend.backend()
    with pytest.raises(ConfigurationError, match=f"input '{name}' of text, on the backend '{backend}'.*'words'"):
        predictor.transform(rows)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="other backends have no strings")
@pytest.mark.parametrize("shape", [pytest.param((), marks=pytest.mark.slow), (1,)])
def test_texts_are_predicted(spark: SparkSession, shape: tuple[int, ...]) -> None:
    texts = ["a cat", "dog", "", None, "cat cat dog"]
    rows = spark.createDataFrame(list(enumerate(texts)), "id int, text string").withColumn(
        "two", F.expr("array(id, 1)")
    )
    predictor = ModelPredictor(of_texts(shape), features_col=["text", "two"], output_col="out", handle_invalid="keep")
    found = {row["id"]: row["out"] for row in predictor.transform(rows).collect()}
    assert found == {0: [1, 3], 1: [4, 1], 2: [2, 1], 3: None, 4: [6, 3]}
    with pytest.raises(ColumnTypeError, match=r"text must hold strings\. Received: type=int.*'id'"):
        predictor.copy({predictor.features_col: ["id", "two"]}).transform(rows)
