"""A driver that trains with one server, and with a server and two shards that are tasks.

``python equal_shards.py FOLDER`` prints a line of JSON: how many weights are equal, and how many there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from distkeras import Trainer
from distkeras.ps.rules import make
from distkeras.settings import grouped
from distkeras.spark import session
from support.training.small_jobs import wide_model
from support.training.spark_jobs import assert_nothing_left, blobs, table


def main() -> None:
    """Train twice, with one worker, whose numbers do not depend on the order of workers."""
    folder = Path(sys.argv[1])
    spark = session("local[5,2]", config={"spark.ui.enabled": "false"})
    rows, weights = table(spark, *blobs()).coalesce(1), list[np.ndarray]()
    places: list[dict[str, Any]] = [{}, {"server": "cluster", "shards": 2, "tls": True}]
    for place in places:
        options = grouped({"num_workers": 1, "batch_size": 32, "num_epoch": 2, "seed": 3} | place)
        trainer = Trainer(
            wide_model(),
            make("easgd", window=2),
            worker_optimizer=keras.optimizers.SGD(0.05),
            loss="sparse_categorical_crossentropy",
            **options,
        )
        trained = trainer.train(rows, checkpoint=str(folder / f"checkpoint {len(weights)}"))
        weights.append(np.concatenate([array.reshape(-1) for array in trained.get_weights()]))
        assert_nothing_left()
    spark.stop()
    one, several = weights
    print(json.dumps({"equal": int((one == several).sum()), "all": len(one)}))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
