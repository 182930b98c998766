"""Labels and weights of other forms than one column an output, on Spark and everywhere that columns are bound."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.present import present
from support.training.spark_jobs import batches_of

from distkeras import Trainer
from distkeras.analysis.keras_gradient import KerasGradient
from distkeras.callbacks import EarlyStopping
from distkeras.data.model_columns import data_spec
from distkeras.ml.estimator import KerasEstimator
from distkeras.ps.errors import BadValueError, ConfigurationError

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables"),
]

ROWS = 20
COLUMNS: dict[str, Any] = {
    "label_col": {"pair": ["a", "b"], "risk": "event", "spare": None},
    "sample_weight_col": {"pair": "w", "risk": None, "spare": None},
}


def survival_loss() -> Any:
    """Return a loss that executors, which do not have this module, receive by value."""

    @keras.saving.register_keras_serializable()  # type: ignore[untyped-decorator]  # Keras has no types
    def survival(y_true: Any, y_pred: Any) -> Any:
        """Return the negative log-likelihood of an exponential distribution with censored times."""
        return keras.ops.exp(y_pred[:, 0]) * y_true[:, 0] - y_true[:, 1] * y_pred[:, 0]

    return survival


SURVIVAL = survival_loss()


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    draw = np.random.default_rng(1)
    x, pair = draw.normal(size=(ROWS, 3)), draw.normal(size=(ROWS, 2))
    events = np.stack([draw.uniform(0.1, 2, ROWS), draw.integers(0, 2, ROWS)], axis=1)
    values = [
        (n % 2, x[n].tolist(), float(pair[n, 0]), float(pair[n, 1]), events[n].tolist(), 0.5 + n % 3)
        for n in range(ROWS)
    ]
    schema = "shop int, features array<float>, a double, b float, event array<double>, w float"
    return spark.createDataFrame(values, schema).cache()


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    sizes = {"pair": 2, "risk": 1, "spare": 2}
    found = keras.Model(inputs, {name: keras.layers.Dense(size, name=name)(inputs) for name, size in sizes.items()})
    found.compile(keras.optimizers.Adam(0.1), {"pair": "mse", "risk": SURVIVAL, "spare": None})
    return found


def expected(df: DataFrame) -> tuple[list[np.ndarray], list[float]]:
    """Return the weights after an epoch of Keras' own steps, and the losses, on the mini-batches of the only worker."""
    plain = model()
    spec = data_spec(
        plain, df.schema, features="features", labels=COLUMNS["label_col"], weight=COLUMNS["sample_weight_col"],
        rows=df, batch_size=8, shuffle=False,
    )  # fmt: skip
    losses = []
    for batch in batches_of(df, spec):
        assert isinstance(batch.weight, tuple)
        y = {"pair": batch.y[0], "risk": batch.y[1], "spare": None}
        w = {"pair": batch.weight[0], "risk": None, "spare": None}
        plain.reset_metrics()
        losses.append(plain.train_on_batch(batch.x[0], y, sample_weight=w, return_dict=True)["loss"])
    return plain.get_weights(), losses


def assert_equal(found: keras.Model, df: DataFrame) -> None:
    for array, value in zip(found.get_weights(), expected(df)[0], strict=True):
        np.testing.assert_allclose(array, value, atol=1e-6)


def trainer(**options: Any) -> Trainer:
    given = COLUMNS | {"num_workers": 1, "batch_size": 8, "shuffle": False} | options
    return Trainer(model(), "downpour", **given)


@pytest.mark.slow
def test_a_job_equals_keras_with_columns_together_labels_of_their_own_length_and_weights_of_an_output(
    rows: DataFrame,
) -> None:
    job = trainer()
    trained = job.train(rows, callbacks=[EarlyStopping(rows, patience=3, every_epochs=1)])
    assert_equal(trained, rows)
    history = present(job.outcome.records).history()
    np.testing.assert_allclose(history["loss"].to_numpy(), expected(rows)[1], rtol=1e-6)
    assert history["samples"].to_pylist() == [8, 8, 4]


@pytest.mark.slow
def test_groups_equal_keras(rows: DataFrame) -> None:
    groups = trainer().train_groups(rows, "shop")
    for shop in range(2):
        assert_equal(groups.model(shop), rows.where(f"shop = {shop}"))


@pytest.mark.slow
def test_an_estimator_fits_evaluates_and_is_saved(rows: DataFrame, tmp_path: Any) -> None:
    estimator = KerasEstimator(model(), "downpour", **COLUMNS, num_workers=1, batch_size=8, shuffle=False)
    estimator.save(str(tmp_path / "estimator"))
    fitted = KerasEstimator.load(str(tmp_path / "estimator")).fit(rows)
    assert_equal(fitted.keras_model, rows)
    frame = rows.toPandas()
    y = {"pair": frame[["a", "b"]].to_numpy(np.float32), "risk": np.stack(frame["event"]), "spare": None}
    w = {"pair": frame["w"].to_numpy(), "risk": None, "spare": None}
    logs = fitted.keras_model.evaluate(
        np.stack(frame["features"]), y, sample_weight=w, batch_size=ROWS, verbose=0, return_dict=True
    )
    assert fitted.evaluate(rows.coalesce(1)) == pytest.approx(logs, rel=1e-5)


@pytest.mark.slow
def test_invalid_rows_name_the_column_of_several(rows: DataFrame) -> None:
    bad = rows.selectExpr("*", "if(w > 2, double('NaN'), b) as c").drop("b").withColumnRenamed("c", "b")
    reasons = {row["reason"] for row in trainer().invalid_rows(bad).select("reason").collect()}
    assert {reason.count("column 'b'") for reason in reasons} == {1}, reasons
    assert trainer().valid_rows(bad).count() == ROWS - bad.where("w > 2").count()
    with pytest.raises(BadValueError) as caught:
        trainer().train(bad)
    assert caught.value.column == "b"


def test_what_cannot_be_is_refused_before_work(rows: DataFrame) -> None:
    with pytest.raises(ConfigurationError, match="`class_weight` needs one label column"):
        trainer(class_weight={0: 2.0}).train(rows)
    with pytest.raises(ConfigurationError, match="`KerasGradient` needs labels of each output"):
        KerasGradient.from_dataframe(model(), rows, **COLUMNS)
    with pytest.raises(ConfigurationError, match="`label_col=None` trains without labels"):
        Trainer(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), "downpour")
