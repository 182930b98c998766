"""The section "predict": predictions, from DataFrame to DataFrame."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path

from bench.gpu_process import Workload, build
from bench.measure import Case, Factory
from bench.whole_job import WORKERS
from bench.workload import rows, session

SECTION = "predict"
BATCH = 1024
TURNS = 5
#: Runs before the first round: within them, JVM and Keras become two to four times as fast.
WARM_UP = 8
#: A longer table repeats the same rows this many times: it takes longer, but no more memory.
TIMES = 10


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    count = 10_000 if quick else 60_000
    return [partial(_predict, count), partial(_predict, count, TIMES)]


@contextmanager
def _predict(count: int, times: int = 1) -> Iterator[Case]:
    from distkeras.data.datasets import write_parquet
    from distkeras.transformers import ModelPredictor

    model, (x, y) = build(Workload("S", BATCH, 1)), rows(count)
    with session() as spark, tempfile.TemporaryDirectory(prefix="distkeras-bench-") as directory:
        frame = spark.read.parquet(write_parquet(Path(directory) / "rows", x, y, files=WORKERS)).cache()
        frame.write.format("noop").mode("overwrite").save()
        predictor = ModelPredictor(model, batch_size=BATCH)
        table = reduce(type(frame).union, [frame] * times)

        def ours() -> float:
            began = time.perf_counter()
            predictor.transform(table).write.format("noop").mode("overwrite").save()
            return times * count / (time.perf_counter() - began)

        def limit() -> float:
            began = time.perf_counter()
            for _ in range(times):
                model.predict(x, batch_size=BATCH, verbose=0)
            return times * count / (time.perf_counter() - began)

        for side in (ours, limit) * -(-WARM_UP // times):
            side()
        turns, note = (TURNS if times == 1 else 1), f"limit: Keras predict on arrays, batches of {BATCH}"
        name = f"S, {times * count} rows"
        yield Case(SECTION, name, "rows/s", ours, limit, target_limit=0.45, turns=turns, note=note)
