"""Tests of data that name Python types: reading the schema of a file must not import a module that the file names."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import keras
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from distkeras import Trainer
from distkeras.ps.errors import ConfigurationError
from distkeras.transformers import ModelPredictor

MODULE = """
from pathlib import Path
from pyspark.sql.types import LongType, UserDefinedType

Path(__file__).with_name("imported").touch()


class Foreign(UserDefinedType):
    @classmethod
    def sqlType(cls):
        return LongType()

    @classmethod
    def module(cls):
        return __name__

    def deserialize(self, datum):
        return datum
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write Parquet, as Spark does, with a column of a type of module ``foreign_types`` in an array of structures."""
    (tmp_path / "foreign_types.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = {"type": "udt", "pyClass": "foreign_types.Foreign", "serializedClass": "", "sqlType": "long"}
    inner = {"type": "struct", "fields": [{"name": "a", "type": kind, "nullable": True, "metadata": {}}]}
    columns = {
        "x": {"type": "array", "elementType": inner, "containsNull": True},
        "features": "float",
        "label": "float",
    }
    fields = [{"name": name, "type": value, "nullable": True, "metadata": {}} for name, value in columns.items()]
    schema = json.dumps({"type": "struct", "fields": fields})
    table = pa.table(
        {
            "x": pa.array([[{"a": 1}]] * 4),
            "features": pa.array([1.0] * 4, pa.float32()),
            "label": pa.array([1.0] * 4, pa.float32()),
        }
    )
    table = table.replace_schema_metadata({"org.apache.spark.sql.parquet.row.metadata": schema})
    pq.write_table(table, tmp_path / "data.parquet")
    return tmp_path / "data.parquet"


def test_a_type_whose_module_is_not_imported_is_refused_by_name(spark: SparkSession, file: Path) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    trainer = Trainer(model, "downpour", worker_optimizer="sgd", loss="mse", num_workers=1)
    for use in (trainer.train, ModelPredictor(model).transform):
        with pytest.raises(ConfigurationError, match=r"types that this program knows.*foreign_types\.Foreign"):
            use(spark.read.parquet(str(file)))
    assert not file.with_name("imported").exists()
    assert "foreign_types" not in sys.modules


def test_a_type_whose_module_is_imported_is_accepted(spark: SparkSession, file: Path) -> None:
    importlib.import_module("foreign_types")
    try:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        predicted = ModelPredictor(model).transform(spark.read.parquet(str(file)))
        assert predicted.columns[-1] == "prediction"
        if not spark.version.startswith("4.0"):  # which does not read these types in batches
            assert predicted.count() == 4
    finally:
        del sys.modules["foreign_types"]
