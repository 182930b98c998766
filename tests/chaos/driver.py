"""A driver that may be killed: goes on with a counting job, or begins it, and writes what became of it into a file.

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

from chaos.jobs import WORKERS, check, counting_job, deadlines
from chaos.store import take_over_servers


def run(order: dict[str, Any]) -> dict[str, Any]:
    """The job's `JobResult`, or what ended it; JSON-ready."""
    from pyspark.sql import SparkSession

    from distkeras.ps.checkpoint.checkpointer import Checkpoint
    from distkeras.ps.errors import DistkerasError

    take_over_servers()
    folder = Path(order["folder"])
    spec = counting_job(folder, rows=order["rows"], epochs=order["epochs"])
    spec.batches.update({int(worker): batches for worker, batches in order["batches"].items()})
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
        model = trainer.train(spec.frame(spark), checkpoint=Checkpoint(order["checkpoint"], every=25), resume=True)
        return {"result": asdict(check(spec, trainer, model))}
    except DistkerasError as error:
        return {"error": type(error).__name__, "text": f"{type(error).__name__}: {error}"}
    finally:
        spark.stop()


def main() -> None:
    """Writes the file when all is over, at once."""
    order = json.loads(sys.argv[1])
    told = run(order)
    draft = Path(order["folder"], "told.part")
    draft.write_text(json.dumps(told))
    draft.replace(Path(order["folder"], "told"))


if __name__ == "__main__":
    main()
