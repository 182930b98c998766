"""The metrics of a job that Prometheus reads."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.prometheus import numbers
from support.training.spark_jobs import blobs, step_callback_layer, table, wait_at_step

from distkeras import Callback, CallbackContext, PrometheusMetrics, Trainer
from distkeras.ps.errors import ConfigurationError


@pytest.mark.slow
def test_metrics_are_served_during_a_job_and_after_it(spark: SparkSession, tmp_path: Path) -> None:
    during: list[dict[str, float]] = []
    seen = tmp_path / "seen"

    class Look(Callback):
        def on_center(self, context: CallbackContext) -> None:
            during.append(numbers(metrics))
            if during[-1]["distkeras_clock"] > 0:
                seen.touch()

    metrics = PrometheusMetrics(every_seconds=0.01)
    try:
        x, y = blobs()
        network = _network(step_callback_layer(wait_at_step(8, seen)))  # after two commits; an epoch has four steps
        trainer: Any = Trainer(network, "agn", worker_optimizer="sgd", loss=LOSS, num_workers=2, num_epoch=3)
        trainer.train(table(spark, x, y), callbacks=[metrics, Look(every_seconds=0.01)])
        assert all(found["distkeras_up"] == 1 for found in during)
        assert 0 < during[-1]["distkeras_clock"] <= trainer.commits.count()
        after = numbers(metrics)
        assert after["distkeras_up"] == 0
        assert after["distkeras_clock"] == trainer.commits.count()
        assert after["distkeras_samples"] == 3 * len(x)
        assert after["distkeras_joined"] == after["distkeras_finished"] == 2
        again = Trainer(_network(), "agn", worker_optimizer="sgd", loss=LOSS, num_workers=1)
        port = metrics.port
        again.train(table(spark, x, y), callbacks=[metrics])
        assert metrics.port == port
        assert numbers(metrics)["distkeras_samples"] == len(x)
    finally:
        metrics.close()
    with pytest.raises(urllib.error.URLError):
        numbers(metrics)


LOSS = "sparse_categorical_crossentropy"


def _network(*hooks: Any) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((2,)), *hooks, keras.layers.Dense(2, "softmax")])


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error_before_any_work(spark: SparkSession) -> None:
    first = PrometheusMetrics()
    x, y = blobs()
    trainer = Trainer(_network(), "agn", worker_optimizer="sgd", loss=LOSS, num_workers=1)
    try:
        trainer.train(table(spark, x, y), callbacks=[first])
        with pytest.raises(ConfigurationError, match="`port` must be free"):
            trainer.train(table(spark, x, y), callbacks=[PrometheusMetrics(first.port)])
    finally:
        first.close()
