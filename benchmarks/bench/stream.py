"""A warm micro-batch of a stream, compared with `keras.Model.fit` on the same rows with a warm model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from bench.measure import Case, Factory
from bench.workload import PATIENCE, WORKERS, build, rows, session

SECTION = "stream"
#: Rows of a mini-batch, and micro-batches before the first one that counts.
BATCH, WARM = 32, 10


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_micro_batch, count, 1 if quick else 5) for count in (64, 2048)]


@contextmanager
def _micro_batch(count: int, turns: int) -> Iterator[Case]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from distkeras import Trainer

    x, y = rows(count)
    table = pa.table({"features": pa.array(list(x), pa.list_(pa.float32())), "label": pa.array(y)})
    model = build("S")
    seconds: list[float] = []
    bare: list[float] = []

    def fit() -> float:
        began = time.perf_counter()
        model.fit(x, y, batch_size=BATCH, verbose=0)
        bare.append(time.perf_counter() - began)
        return 1 / bare[-1]

    with tempfile.TemporaryDirectory(prefix="distkeras-bench-") as folder, session() as spark:
        arriving, place = Path(folder, "in"), Path(folder, "checkpoint")
        arriving.mkdir()
        stream = spark.readStream.schema("features array<float>, label int").parquet(str(arriving))
        trainer = Trainer(build("S"), "agn", num_workers=WORKERS, batch_size=BATCH)
        training = trainer.train_stream(stream, checkpoint=place)

        def train() -> float:
            number, deadline = len(seconds), time.monotonic() + PATIENCE
            pq.write_table(table, Path(folder, "arriving"))
            Path(folder, "arriving").rename(arriving / f"{number}.parquet")
            while (latest := training.lastProgress) is None or latest.batch < number:
                training.awaitTermination(0.02)  # This raises the error that ended the stream.
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a micro-batch must end within {PATIENCE:g} s")
            seconds.append(latest.seconds)
            return 1 / latest.seconds

        for _ in range(WARM):
            train(), fit()

        def note() -> str:
            added = median(ours - plain for ours, plain in zip(seconds[WARM:], bare[WARM:], strict=True))
            return f"limit: keras.fit of these rows. A micro-batch adds {added:.2f} s"

        yield Case(SECTION, f"micro-batch of {count} rows", "micro-batches/s", train, fit, turns=turns, note=note)
        training.stop()
