"""The model of each group, which predicts the group's rows: in pipelines, SQL and streams, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import SQLTransformer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from distkeras import KerasEstimator, KerasGroupModel, KerasModel, register_function
from distkeras.ps.errors import BadValueError, ConfigurationError
from distkeras.transformers import AccuracyEvaluator

SHOPS = 4


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    """Return rows of several shops, each with its own function, which no common model fits."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(SHOPS * 60, 2)).astype(np.float32)
    shop = np.arange(len(x)) % SHOPS
    angle = shop * np.pi / 2
    label = (x[:, 0] * np.cos(angle) + x[:, 1] * np.sin(angle) > 0).astype(np.int64)
    frame = pd.DataFrame({"shop": [f"s{n}" for n in shop], "year": shop % 2, "features": x.tolist(), "label": label})
    return (
        spark.createDataFrame(frame, "shop string, year int, features array<float>, label long").repartition(3).cache()
    )


def estimator() -> KerasEstimator:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
    return KerasEstimator(
        model, worker_optimizer=keras.optimizers.Adam(0.1), loss="binary_crossentropy", num_workers=2, batch_size=8,
        num_epoch=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fitted(df: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> KerasGroupModel:
    return estimator().fitGroups(df, by="shop", path=tmp_path_factory.mktemp("models"))


def expected(fitted: KerasGroupModel, df: DataFrame) -> dict[tuple[float, ...], float]:
    """Return the probability of each row under its own shop's model, by features."""
    rows = df.toPandas()
    found: dict[tuple[float, ...], float] = {}
    for shop, of_shop in rows.groupby("shop"):
        x = np.stack(of_shop["features"]).astype(np.float32)
        outputs = np.asarray(fitted.groups.model(shop)(x))[:, 0]
        found |= {tuple(row): float(output) for row, output in zip(x.tolist(), outputs, strict=True)}
    return found


@pytest.mark.slow
def test_each_row_has_the_prediction_of_its_groups_model(fitted: KerasGroupModel, df: DataFrame) -> None:
    scored = fitted.transform(df)
    assert scored.columns == [*df.columns, "prediction", "rawPrediction", "probability"]
    by_row = expected(fitted, df)
    rows = scored.collect()
    assert len(rows) == SHOPS * 60
    for row in rows:
        assert row["probability"][1] == pytest.approx(by_row[tuple(row["features"])], abs=1e-6)
        assert row["prediction"] == float(row["probability"][1] > 0.5)
    assert AccuracyEvaluator(prediction_col="prediction", label_col="label").evaluate(scored) > 0.9
    one = KerasModel(fitted.groups.model("s0")).transform(df)
    assert AccuracyEvaluator(prediction_col="prediction", label_col="label").evaluate(one) < 0.7


@pytest.mark.slow
def test_unknown_keys_are_invalid_rows(fitted: KerasGroupModel, df: DataFrame) -> None:
    strange = df.withColumn("shop", F.when(F.col("shop") == "s1", F.lit("new")).otherwise(F.col("shop")))
    with pytest.raises(BadValueError, match="there is no model for shop=new"):
        AccuracyEvaluator(prediction_col="prediction", label_col="label").evaluate(fitted.transform(strange))
    kept = fitted.copy().setParams(handle_invalid="keep", invalid_col="why").transform(strange).collect()
    assert len(kept) == SHOPS * 60
    by_row = expected(fitted, df)
    for row in kept:
        if row["shop"] == "new":
            assert (row["prediction"], row["probability"]) == (None, None)
            assert row["why"] == "there is no model for shop=new"
        else:
            assert row["why"] is None
            assert row["probability"][1] == pytest.approx(by_row[tuple(row["features"])], abs=1e-6)
    skipping = fitted.copy().setParams(handle_invalid="skip")
    assert skipping.transform(strange).count() == (SHOPS - 1) * 60
    assert skipping.transform(strange.where("shop = 'new'")).collect() == []


@pytest.mark.slow
def test_one_batch_may_have_bad_values_and_unknown_keys(fitted: KerasGroupModel, df: DataFrame) -> None:
    broken = df.withColumn(
        "features", F.when((F.col("shop") == "s2") & (F.col("label") == 0), F.lit(None)).otherwise(F.col("features"))
    ).withColumn("shop", F.when(F.col("shop") == "s1", F.lit(None)).otherwise(F.col("shop")))
    kept = fitted.copy().setParams(handle_invalid="keep", invalid_col="why").transform(broken.coalesce(1)).collect()
    by_row = expected(fitted, df)
    reasons = {"null": 0, "no model": 0}
    for row in kept:
        if row["features"] is None:
            assert "must not be null" in row["why"]
            reasons["null"] += 1
        elif row["shop"] is None:
            assert row["why"] == "there is no model for shop=null"
            reasons["no model"] += 1
        else:
            assert row["probability"][1] == pytest.approx(by_row[tuple(row["features"])], abs=1e-6)
    assert reasons["no model"] == 60
    assert 0 < reasons["null"] < 60


@pytest.mark.slow
def test_a_group_model_is_saved_and_loaded_in_a_pipeline(
    fitted: KerasGroupModel, df: DataFrame, tmp_path: Path
) -> None:
    place = str(tmp_path / "pipeline")
    PipelineModel([SQLTransformer(statement="SELECT * FROM __THIS__"), fitted]).write().overwrite().save(place)
    loaded = PipelineModel.load(place)
    ours, theirs = (
        {tuple(r["features"]): r["probability"][1] for r in m.transform(df).collect()}
        for m in (fitted, loaded.stages[1])
    )
    assert ours == theirs
    again = loaded.stages[1]
    assert isinstance(again, KerasGroupModel)
    assert again.groups.table.count() == SHOPS
    assert str(tmp_path) in again.groups.path


@pytest.mark.slow
def test_a_group_model_is_a_function_of_sql(fitted: KerasGroupModel, df: DataFrame, spark: SparkSession) -> None:
    register_function(spark, "of_shop", fitted, returns="probability")
    df.createOrReplaceTempView("shops")
    rows = spark.sql("SELECT features, of_shop(features, shop) AS p FROM shops").collect()
    by_row = expected(fitted, df)
    assert len(rows) == SHOPS * 60
    for row in rows:
        assert row["p"][1] == pytest.approx(by_row[tuple(row["features"])], abs=1e-6)


@pytest.mark.slow
def test_a_group_model_scores_a_stream(
    fitted: KerasGroupModel, df: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    df.write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema(df.schema).parquet(str(tmp_path / "rows"))
    query = (
        fitted.transform(stream).select("features", "prediction").writeStream.format("memory").queryName("scored")
        .trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    by_row = expected(fitted, df)
    rows = spark.table("scored").collect()
    assert len(rows) == SHOPS * 60
    assert all(row["prediction"] == float(by_row[tuple(row["features"])] > 0.5) for row in rows)


@pytest.mark.slow
def test_single_rows_are_predicted_with_keys_that_are_features(df: DataFrame) -> None:
    features = estimator().setParams(features_col=["year", "label"], label_col="label")
    fitted = features.fitGroups(df, by=["shop", "year"])
    scored = {(r["shop"], r["label"]): r["probability"] for r in fitted.transform(df).collect()}
    key = {"shop": "s1", "year": 1}
    assert fitted.predictProbability([1, 0], key) == pytest.approx(scored["s1", 0].toArray(), abs=1e-6)
    assert fitted.predict([1, 0], key) == float(scored["s1", 0][1] > 0.5)
    assert fitted.predictRaw([1, 0], key).shape == (2,)
    with pytest.raises(ConfigurationError, match="there is no model for shop=s1, year=0"):
        fitted.predict([1, 0], {"shop": "s1", "year": 0})


@pytest.mark.slow
def test_options_that_groups_exclude_are_refused(fitted: KerasGroupModel, df: DataFrame) -> None:
    with pytest.raises(ConfigurationError, match="`fitGroups` has none of"):
        estimator().setParams(validation_split=0.1).fitGroups(df, by="shop")
    with pytest.raises(ConfigurationError, match="must be evaluated by an evaluator"):
        fitted.evaluate(df)
    with pytest.raises(ConfigurationError, match="`dataset` must be a Spark DataFrame"):
        estimator().fitGroups([1], by="shop")  # type: ignore[arg-type]  # the test passes a wrong type
    with pytest.raises(ConfigurationError, match="`groups` must be set"):
        KerasGroupModel().groups  # noqa: B018 - it raises


@pytest.mark.slow
def test_weights_of_a_group_do_not_reach_other_models(fitted: KerasGroupModel, df: DataFrame) -> None:
    """The template's predictions use its own weights in Python workers that have just used the groups' weights."""
    template = KerasModel(fitted.keras_model)
    one_partition = df.coalesce(1)
    before = [row["probability"] for row in template.transform(one_partition).collect()]
    fitted.transform(one_partition).collect()
    assert [row["probability"] for row in template.transform(one_partition).collect()] == before
    pipeline = Pipeline(
        stages=[template, fitted.copy().setParams(prediction_col="p", probability_col="q", raw_prediction_col="")]
    )
    both = pipeline.fit(df).transform(one_partition).select("probability", "q").collect()
    assert [row["probability"] for row in both] == before
    assert any(row["probability"] != row["q"] for row in both)
