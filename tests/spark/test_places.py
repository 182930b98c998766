"""Paths and URIs as Spark takes them: the same folder as Arrow's, or a refusal by name."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest
from pyspark.sql import SparkSession

from distkeras import KerasEstimator, KerasModel
from distkeras.ps.errors import ConfigurationError
from distkeras.spark.places import arrow_uri, hadoop_path, stage_path


def test_hadoop_has_the_folder_that_arrow_opens(spark: SparkSession, tmp_path: Path) -> None:
    odd = "a b ü+#%20[:é"
    for place in (str(tmp_path / odd), (tmp_path / odd).as_uri()):
        assert hadoop_path(spark, place, "checkpoint") == f"file://{tmp_path / odd}"
    assert hadoop_path(spark, "s3://bucket/a%20b?region=eu-west-1", "checkpoint") == "s3://bucket/a b"
    assert arrow_uri("hdfs://host:9000/a b%20") == "hdfs://host:9000/a%20b%2520"
    with pytest.raises(ConfigurationError, match="`checkpoint` must be in UTF-8"):
        hadoop_path(spark, "/a\udcff", "checkpoint")


@pytest.mark.parametrize("character", "*?[{\\")
def test_a_path_that_spark_would_read_as_a_pattern_is_refused_before_it_is_written(
    spark: SparkSession, tmp_path: Path, character: str
) -> None:
    model = KerasModel(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    with pytest.raises(ConfigurationError, match=r"`path` must have none of the characters .*Received: path="):
        model.write().overwrite().save(str(tmp_path / f"a{character}b"))
    assert list(tmp_path.iterdir()) == []


def test_a_relative_path_is_one_of_the_present_working_directory(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the Java virtual machine keeps the directory in which it was started
    assert stage_path(spark, "model") == str(tmp_path / "model")
    assert stage_path(spark, "hdfs:///model") == "hdfs:///model"
    estimator = KerasEstimator(checkpoint="fits")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert estimator.getOrDefault("checkpoint") == str(tmp_path / "fits")
