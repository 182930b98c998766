"""A driver that may be killed; it starts or continues a counting job or a stream, and writes its outcome.

`drivers.Drivers` starts it: ``python driver.py JSON``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]

from chaos.jobs import WORKERS, JobSpec, counting_job, deadlines, stream_job, wide_stream_job
from chaos.store import take_over_servers


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Run the job; return its `JobResult`, or the error that ended it, as values for JSON."""
    from pyspark.sql import SparkSession

    from distkeras.ps.errors import DistkerasError

    take_over_servers()
    folder = Path(order["folder"])
    spec = _spec(order, folder)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}
    settings |= {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    settings |= {"spark.sql.shuffle.partitions": str(WORKERS), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    builder = SparkSession.builder.master(f"local[{WORKERS},10000]").appName("distkeras chaos, a driver")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    trainer = spec.trainer(deadlines=deadlines())
    try:
        model = spec.train(spark, trainer, Path(order["checkpoint"]), resume=True)
        return {"result": asdict(spec.check(trainer, model))}
    except DistkerasError as error:
        return {"error": type(error).__name__, "text": f"{type(error).__name__}: {error}"}
    finally:
        spark.stop()


def _spec(order: dict[str, Any], folder: Path) -> JobSpec:
    """Return the job; a stream's rows are the same files for all drivers."""
    size = {"rows": order["rows"], "epochs": order["epochs"]}
    if order["micro_batches"]:
        folder = Path(order["data"])
        make_job = wide_stream_job if folder.name.startswith("wide") else stream_job
        return make_job(folder.parent, micro_batches=order["micro_batches"], **size)
    spec = counting_job(folder, **size)
    spec.batches.update({int(worker): batches for worker, batches in order["batches"].items()})
    return spec


def main() -> None:
    """Run the job, and write the outcome at once when it has ended."""
    order = json.loads(sys.argv[1])
    outcome = run(order)
    draft = Path(order["folder"], "outcome.part")
    draft.write_text(json.dumps(outcome))
    draft.replace(Path(order["folder"], "outcome"))


if __name__ == "__main__":
    main()
