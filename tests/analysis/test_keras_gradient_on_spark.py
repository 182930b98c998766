"""The simulator on the rows of a DataFrame, and the order of a real job's commits in the simulator."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.patience import patience
from support.training.spark_jobs import assert_nothing_left, blobs, step_callback_layer, table, wrong_model

from distkeras import Trainer
from distkeras.analysis import metrics
from distkeras.analysis.keras_gradient import KerasGradient
from distkeras.ps.errors import BadValueError, ConfigurationError, EmptyDataError, MissingColumnError
from distkeras.ps.simulation.simulate import simulate

SPARSE = "sparse_categorical_crossentropy"


@pytest.fixture(scope="module")
def clouds(spark: SparkSession) -> DataFrame:
    return table(spark, *blobs()).cache()


def rows(function: KerasGradient) -> np.ndarray:
    """Return features and label of each row, in sorted order."""
    together = np.column_stack([function.x[0], function.y[0]])
    return together[np.lexsort(together.T)]


def test_a_dataframe_gives_the_gradient_of_its_rows(clouds: DataFrame) -> None:
    x, y = blobs()
    options: dict[str, Any] = {"loss": SPARSE, "seed": 3, "workers": 2}
    columns = KerasGradient.from_dataframe(wrong_model(), clouds, batch_size=len(x), **options)
    arrays = KerasGradient(wrong_model(), x, y, batch_size=len(x), **options)
    np.testing.assert_array_equal(rows(columns), rows(arrays))
    theta = arrays.theta0 + np.float32(0.1)
    # One mini-batch has all rows; only the order in which float32 adds them differs.
    np.testing.assert_allclose(columns(theta, 1), arrays(theta, 1), rtol=1e-5, atol=1e-7)
    assert columns.loss(theta) == pytest.approx(arrays.loss(theta), rel=1e-6)
    again = KerasGradient.from_dataframe(wrong_model(), clouds.repartition(5), batch_size=16, **options)
    same = KerasGradient(wrong_model(), columns.x[0], columns.y[0], batch_size=16, **options)
    for worker in (0, 1, 1):
        np.testing.assert_array_equal(again(theta, worker), same(theta, worker))


@pytest.mark.slow
def test_the_column_of_sample_weights_is_used(spark: SparkSession) -> None:
    x, y = blobs(40)
    weight = np.linspace(0.5, 2, 40).astype(np.float32)
    df = spark.createDataFrame(
        list(zip(x.tolist(), y.tolist(), weight.tolist(), strict=True)), "v array<float>, c int, w float"
    )
    options: dict[str, Any] = {"loss": SPARSE, "batch_size": 40}
    columns = KerasGradient.from_dataframe(
        wrong_model(), df, features_col="v", label_col="c", sample_weight_col="w", **options
    )
    arrays = KerasGradient(wrong_model(), x, y, sample_weight=weight, **options)
    theta = arrays.theta0
    np.testing.assert_allclose(columns(theta, 0), arrays(theta, 0), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_invalid_arguments_are_refused(spark: SparkSession, clouds: DataFrame) -> None:
    read = KerasGradient.from_dataframe
    # A row is two float32 and an int32: 256 rows are 3072 bytes.
    assert read(wrong_model(), clouds, loss=SPARSE, max_bytes=3072).rows == 256
    with pytest.raises(ConfigurationError, match="max_bytes=3071, which is 255 rows"):
        read(wrong_model(), clouds, loss=SPARSE, max_bytes=3071)
    with pytest.raises(EmptyDataError):
        read(wrong_model(), clouds.limit(0), loss=SPARSE)
    with pytest.raises(MissingColumnError, match="other"):
        read(wrong_model(), clouds, label_col="other", loss=SPARSE)
    with pytest.raises(BadValueError, match=r"\[0, 2\)"):
        read(wrong_model(), spark.createDataFrame([([1.0, 2.0], 2)], "features array<float>, label int"), loss=SPARSE)


def wait_for_all_workers(port: int) -> Callable[[int], None]:
    """Return an action for `step_callback_layer` in which each worker's first step waits for those of all workers."""

    def action(step: int) -> None:
        if step == 0:
            with socket.create_connection(("127.0.0.1", port), 60) as link:
                assert link.recv(1) == b"!"

    return action


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["downpour", "dynsgd"])
def test_a_recorded_job_replays_with_the_same_staleness(clouds: DataFrame, rule: str) -> None:
    workers = 2
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(patience(120))

        def release_workers() -> None:
            links = [listener.accept()[0] for _ in range(workers)]
            for link in links:
                link.sendall(b"!")
                link.close()

        # Both workers have received the center before either commits, like simulated workers.
        usher = threading.Thread(target=release_workers, daemon=True)
        usher.start()
        plain = wrong_model()
        model = keras.Sequential(
            [keras.Input((2,)), step_callback_layer(wait_for_all_workers(listener.getsockname()[1])), *plain.layers]
        )
        trainer = Trainer(
            model, rule, worker_optimizer=keras.optimizers.SGD(0.05), loss=SPARSE, num_workers=workers, batch_size=4,
            num_epoch=2,
        )  # fmt: skip
        trainer.train(clouds)
        usher.join(patience(60))
        assert not usher.is_alive()
    recorded = trainer.commits.toPandas().sort_values("clock")
    schedule = metrics.recorded_schedule(trainer.commits)
    assert set(schedule) == {0, 1}
    gradient = KerasGradient(plain, *blobs(), loss=SPARSE, workers=workers)
    trace = simulate(rule, gradient.theta0, gradient, workers=workers, learning_rate=0.05, schedule=schedule)
    assert trace.staleness.tolist() == recorded["staleness"].tolist()
    np.testing.assert_allclose(trace.scale, recorded["scale"], rtol=1e-6)
    assert trace.staleness.max() > 0
    assert_nothing_left()
