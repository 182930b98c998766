"""Paths and URIs as Spark takes them: the same folder as Arrow's, or a refusal by name."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from support.cases import examples

from distkeras import KerasEstimator, KerasModel
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import ConfigurationError, SnapshotError
from distkeras.ps.world.files import below
from distkeras.spark.cluster import arrow_uri, hadoop_path, stage_path
from distkeras.training.stream_halves import QueryState, query_state


def test_hadoop_has_the_folder_that_arrow_opens(spark: SparkSession, tmp_path: Path) -> None:
    odd = "a b ü+#%20[:é"
    for place in (str(tmp_path / odd), (tmp_path / odd).as_uri()):
        assert hadoop_path(spark, place, "checkpoint") == f"file://{tmp_path / odd}"
    assert hadoop_path(spark, "s3://bucket/a%20b?region=eu-west-1", "checkpoint") == "s3://bucket/a b"
    assert arrow_uri("hdfs://host:9000/a b%20") == "hdfs://host:9000/a%20b%2520"
    with pytest.raises(ConfigurationError, match="`checkpoint` must be in UTF-8"):
        hadoop_path(spark, "/a\udcff", "checkpoint")
    with pytest.raises(ConfigurationError, match="`checkpoint` must have a name that Spark's Java virtual machine"):
        hadoop_path(spark, "/a\0b", "checkpoint")  # as a letter with an accent is under a locale of ASCII


def test_a_query_whose_records_cannot_be_read_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    assert query_state(spark, f"file://{tmp_path}/new") == QueryState(f"file://{tmp_path}/new")
    (tmp_path / "metadata").write_text("{}")
    for folder, why in ((f"file://{tmp_path}", "'id'"), ("nowhere://a/b", "nowhere")):
        with pytest.raises(SnapshotError, match=f"Spark's part of the checkpoint, .* cannot be read: .*{why}"):
            query_state(spark, folder)


@examples(60)
@given(name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=20))
def test_python_and_hadoop_see_each_others_files_under_drawn_names(spark: SparkSession, name: str) -> None:
    """Names that no folder can have are the only ones that are left out."""
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to Hadoop's file systems
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - the same
    assume(name not in (".", "..") and len(name.encode()) < 250)
    with tempfile.TemporaryDirectory() as root:
        for place in (f"{root}/{name}", Path(root, name).as_uri()):
            store = Store(below(Checkpoint(place).uri, "center"))
            store.save("one", {}, {})
            path = jvm.org.apache.hadoop.fs.Path(hadoop_path(spark, Checkpoint(place).uri, "checkpoint"))
            files = path.getFileSystem(configuration)
            assert files.exists(jvm.org.apache.hadoop.fs.Path(path, "center/one.dks"))
            files.mkdirs(jvm.org.apache.hadoop.fs.Path(path, "query"))
            assert sorted(path.name for path in Path(root, name).iterdir()) == ["center", "query"]
            assert [path.name for path in Path(root).iterdir()] == [name]
            shutil.rmtree(f"{root}/{name}")


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
