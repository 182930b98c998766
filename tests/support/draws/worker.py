"""One worker's task and a server in this process: what a job on Spark runs, fed with the rows of a drawn job."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np
import pyarrow as pa

from distkeras import Trainer
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.tables import CutModel
from distkeras.ps.protocol.framing import KEY_BYTES
from distkeras.ps.protocol.loop import FIXED_HISTORY
from distkeras.ps.rules import Rule
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.results import JobRecords
from distkeras.spark.cluster import SparkFacts
from distkeras.spark.notice import Notice
from distkeras.spark.record_stream import RecordStream
from distkeras.training.plan import CenterCopy, JobPlan, Publication
from distkeras.training.task import TaskAttempt
from support.draws.jobs import MiniBatch, Prepared, place_names
from support.patience import PATIENT

_KEY = bytes(KEY_BYTES)
_FACTS = SparkFacts(connect=False, master="local[1]", parallelism=1, cores_known=True, settings={})

#: Arguments of `compile` that a trainer takes under the same names.
_COMPILED = ("loss", "metrics", "loss_weights", "weighted_metrics")


class Result(NamedTuple):
    """The result of a job: the center, the moving statistics, and loss and metrics of each mini-batch by name."""

    center: np.ndarray
    statistics: np.ndarray
    history: dict[str, np.ndarray]
    model: keras.Model


def columns_of(prepared: Prepared) -> dict[str, Any]:
    """Return the trainer's arguments that name the columns."""
    built = prepared.built
    x, y = place_names(built.places), [f"y{number}" for number in range(len(built.outputs) or 1)]
    features: Any = dict(zip(built.inputs, x, strict=True)) if built.inputs else x
    labels: Any = dict(zip(built.outputs, y, strict=True)) if built.keyed else y
    single = {"features_col": features if len(x) > 1 else x[0], "label_col": labels if len(y) > 1 else y[0]}
    return single | ({} if prepared.batches[0].weight is None else {"sample_weight_col": "weight"})


def trainer_of(prepared: Prepared, rule: Rule, *, given: bool, **options: Any) -> Trainer:
    """Return the trainer of a job; its constructor refuses what cannot be trained."""
    arguments = {name: prepared.arguments[name] for name in _COMPILED if name in prepared.arguments}
    arguments["worker_optimizer"] = prepared.arguments["optimizer"]
    return Trainer(
        prepared.built.model,
        rule,
        num_workers=1,
        batch_size=prepared.batches[0].x[0].shape[0],
        shuffle=False,
        deadlines=PATIENT,
        **columns_of(prepared),
        **(arguments if given else {}),
        **options,
    )


def table_of(batches: list[MiniBatch]) -> pa.Table:
    """Return the rows of the mini-batches as Spark sends them: numbers, and flat arrays of numbers."""
    sides = {
        "x": list(zip(*(batch.x for batch in batches), strict=True)),
        "y": list(zip(*(batch.y for batch in batches), strict=True)),
    }
    columns = {
        f"{side}{number}": _column(np.concatenate(parts))
        for side, found in sides.items()
        for number, parts in enumerate(found)
    }
    weights = [batch.weight for batch in batches if batch.weight is not None]
    return pa.table(columns | ({"weight": pa.array(np.concatenate(weights))} if weights else {}))


def _column(rows: np.ndarray) -> pa.Array:
    # Spark has no bytes without a sign, and no half precision.
    sent = {"uint8": "int16", "float16": "float32"}.get(str(rows.dtype), rows.dtype)
    values = pa.array(rows.astype(sent).ravel())
    return (
        values
        if rows.ndim == 1
        else pa.FixedSizeListArray.from_arrays(values, rows[0].size).cast(pa.list_(values.type))
    )


def schema_of(table: pa.Table) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(table.schema)


class _Rows(NamedTuple):
    """What a trainer's checks read of a DataFrame, whose rows they leave as they are if it is a stream."""

    schema: Any
    isStreaming: bool = True


def plan_of(trainer: Trainer, table: pa.Table) -> JobPlan:
    """Return the plan that the trainer makes for a DataFrame of these rows."""
    replica = KerasReplica.of(trainer.recipe, trainer.model_file)
    rows: Any = _Rows(schema_of(table))
    data = trainer._bind(rows, replica)  # noqa: SLF001 - the checks of `train`, which needs Spark
    return JobPlan(
        data=data.rewindable(),
        training=trainer.settings,
        model_file=trainer.model_file,
        recipe=trainer.recipe,
        replica=replica,
        cut=CutModel({}),
        server=replace(trainer.server_settings, workers=1, host="127.0.0.1"),
        worker=replace(trainer.worker_settings, workers=1),
        callbacks=[],
        resume=False,
        facts=_FACTS,
    )


def trained(plan: JobPlan, table: pa.Table) -> Result:
    """Train with one worker."""
    server = ParameterServer(plan.server, _KEY)
    with server:
        address = Address(*server.address, _KEY)
        driver = DriverClient(address, plan.server.deadlines)
        try:
            Publication(plan).send(driver)
            records = RecordStream(iter(table.to_batches()), io.BufferedReader(io.BytesIO(b"more")))
            TaskAttempt(plan.task(address), 0, 0, records, Notice()).run()
            center = CenterCopy(plan).fetch(driver)
            kept = JobRecords.drain(driver)
        finally:
            driver.close()
    rows = kept.steps_array[:, len(FIXED_HISTORY) :]
    replica: KerasReplica = plan.replica
    replica.load(center.vector)
    replica.load_moving_statistics(center.moving_statistics)
    return Result(center.vector, center.moving_statistics, dict(zip(kept.metrics, rows.T, strict=True)), replica.model)
