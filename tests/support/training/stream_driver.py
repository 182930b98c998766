"""The driver of a stream that counts rows: a program that tests kill.

A worker's mini-batch, and the driver between a snapshot and Spark's record that a micro-batch is complete, block
if the file ``hold-NAME`` exists: the process renames it to ``held-NAME``, writes its process id to ``pid-NAME``,
and waits until ``held-NAME`` is removed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distkeras import Trainer
from distkeras.ps.rules import make
from distkeras.spark import session
from distkeras.training.stream import StreamTraining
from support.training.small_jobs import sgd
from support.training.spark_jobs import counting_model, counts, step_callback_layer, total
from support.training.streams import arriving

_note_progress = StreamTraining._note_progress  # noqa: SLF001 - patched at the moment after the snapshot


def holding(folder: str, name: str) -> Callable[..., None]:
    """Return a function that blocks the caller as described above."""

    def hold(*_: object) -> None:
        held = Path(folder, f"held-{name}")
        try:
            Path(folder, f"hold-{name}").rename(held)
        except FileNotFoundError:
            return
        Path(folder, f"pid-{name}").write_text(str(os.getpid()))
        pause = threading.Event()
        for _look in range(6000):
            if not held.exists():
                return
            pause.wait(0.05)
        raise TimeoutError(held)

    return hold


def main(folder: Path, rows: int) -> None:
    hold = holding(str(folder), "driver")

    def note(self: StreamTraining, *arguments: Any) -> None:
        _note_progress(self, *arguments)
        hold()

    StreamTraining._note_progress = note  # type: ignore[assignment]  # noqa: SLF001
    config = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.memory": "1g"}
    spark = session("local[2,4]", config=config)
    spark.sparkContext.setLogLevel("OFF")
    trainer = Trainer(
        counting_model(rows, step_callback_layer(holding(str(folder), "worker"))),
        make("downpour", window=1),
        worker_optimizer=sgd(),
        loss=total,
        num_workers=2,
        batch_size=2,
    )
    training = trainer.train_stream(
        arriving(spark, folder / "in"), checkpoint=folder / "checkpoint", trigger={"availableNow": True}
    )
    training.awaitTermination(600)
    (folder / "counts").write_text(json.dumps(counts(training.model())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
