"""The training jobs that are disturbed; each one shows that every mini-batch counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.ps.world.files import below

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

    from distkeras import Trainer
    from distkeras.keras_model.stored_rows import SavedRows
    from distkeras.ps.rules import Rule
    from distkeras.ps.transport.deadlines import Deadlines

WORKERS = 3
#: Seconds that a server may be suspended; "stop server" is shorter, and "freeze server" is longer.
_STANDSTILL = 15.0
#: Seconds that a stream has to end after its limit.
_STOP = 30.0
#: The difference in accuracy, in points, that is allowed between a disturbed job and the undisturbed one.
POINTS = 1.0

#: The rate of the image jobs. At this rate, one worker alone (no staleness) and three end within half a point; at
#: twice
#: the rate they differ by more than two points, and a disturbed job mostly has one or two workers.
_BATCH, _RATE = 32, 0.1


@dataclass(frozen=True)
class JobSpec:
    """One kind of job.

    Args:
        name: its name in the report.
        folder: the Parquet files of its rows.
        rows, epochs, batch_size: its size.
        rule: the update rule, or its name.
        options: options of the trainer for this rule.
        build: returns the compiled model.
        judge: returns the accuracy of a trained model, and its errors (empty if there are none).
        batches: mini-batches of each worker in an epoch; see `with_batches_counted`.
        micro_batches: number of micro-batches of a stream, each a file of its rows; 0 if its rows are a table.
        s3: the folder of its checkpoints in S3; empty if they go to the small disk.
    """

    name: str
    folder: str
    rows: int
    epochs: int
    batch_size: int
    rule: str | Rule
    options: dict[str, Any]
    build: Callable[[], keras.Model]
    judge: Callable[[keras.Model], tuple[float | None, str]]
    batches: dict[int, int] = field(default_factory=dict)
    micro_batches: int = 0
    s3: str = ""

    @property
    def expected(self) -> int:
        """Return the number of mini-batches of the whole job; for a stream, of rows over all epochs."""
        return self.rows * self.epochs if self.micro_batches else sum(self.batches.values()) * self.epochs

    @property
    def unit(self) -> str:
        """Return what `expected` counts."""
        return "rows" if self.micro_batches else "mini-batches"

    @property
    def in_own_drivers(self) -> bool:
        """Return whether drivers in processes of their own can run the job too."""
        return self.rule == "downpour" and not self.options and not self.s3

    def checkpoint(self, folder: Path) -> str:
        """Return the place of the checkpoints of one job, whose own folder on the small disk is ``folder``."""
        return below(self.s3, folder.name) if self.s3 else str(folder)

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the job's rows."""
        return spark.read.parquet(self.folder)

    def trainer(self, **options: Any) -> Trainer:
        """Return a trainer for the job; ``options`` apply to this one job."""
        from distkeras import Monitoring, Trainer
        from distkeras.settings import grouped

        return Trainer(
            self.build(),
            self.rule,
            num_workers=WORKERS,
            batch_size=self.batch_size,
            num_epoch=self.epochs,
            monitoring=Monitoring(progress=False),
            **grouped(self.options | options),
        )

    def train(self, spark: SparkSession, trainer: Trainer, checkpoint: Path, *, resume: bool = False) -> keras.Model:
        """Train and return the model; a stream or a resumed job continues from the checkpoint.

        Raises:
            DistkerasError: If the job failed.
        """
        from distkeras.ps.checkpoint.checkpointer import Checkpoint
        from distkeras.training.stream import query_folder
        from distkeras.training.stream_halves import query_state

        rows, place = self.frame(spark), Checkpoint(self.checkpoint(checkpoint), every=25)
        if not self.micro_batches:
            return trainer.train(rows, checkpoint=place, resume=resume)
        stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1).parquet(self.folder)
        versions = str(Path(self.folder).parent / f"versions-{checkpoint.name}")
        training = trainer.train_stream(stream, checkpoint=place, trigger={"availableNow": True}, publish=versions)
        try:
            training.awaitTermination()
        except KeyboardInterrupt:
            training.stop(_STOP)
            raise
        model: keras.Model = training.model()
        # If a driver dies while Spark plans a micro-batch, Spark adds its rows to the next one, and there is one fewer.
        self._require_last_version(versions, model, query_state(spark, query_folder(spark, place)).done)
        return model

    @staticmethod
    def _require_last_version(uri: str, model: keras.Model, due: int) -> None:
        """Raise LedgerError unless the last version is that of micro-batch ``due``, with the weights of ``model``."""
        from distkeras.keras_model.published_rows import published_rows
        from distkeras.ps.checkpoint.versions import VersionFolder
        from distkeras.ps.errors import LedgerError

        folder = VersionFolder(uri)
        version = folder.latest()
        center, _ = folder.load(version, folder.model()[1])
        rows = folder.rows_of(version)
        saved = published_rows(uri, rows, _TABLE) if rows else None
        equal = np.array_equal(center, _weights(model)) if saved is None else _rows_in(saved) == _trained_rows(model)
        if version.number != due or not equal:
            raise LedgerError(f"version {due} must have the weights of the stream. Received: version {version.number}")

    def with_batches_counted(self, trainer: Trainer) -> JobSpec:
        """Return the job with its mini-batches, from an undisturbed job in which every row counted once."""
        if self.batches or self.micro_batches:
            return self
        history: Any = trainer.history.toPandas()
        first = history.query("epoch == 0")
        assert first.samples.sum() == self.rows
        return replace(self, batches=first.groupby("worker").size().to_dict())

    def check(self, trainer: Trainer, model: keras.Model) -> JobResult:
        """Compare the ledger's counts with the data's; this does not rely on the trainer's own check."""
        return _check_stream(self, trainer, model) if self.micro_batches else _check(self, trainer, model)


@dataclass(frozen=True)
class JobResult:
    """The outcome of one job."""

    expected: int
    committed: int = 0
    lost: int = 0
    duplicated: int = 0
    attempts: int = 0
    incarnations: int = 0
    seconds: float = 0.0
    accuracy: float | None = None
    problems: tuple[str, ...] = ()


def deadlines() -> Deadlines:
    """Return the deadlines of all jobs."""
    from distkeras.ps.transport.deadlines import Deadlines

    return Deadlines(lease=30.0, standstill=_STANDSTILL)


def _check(spec: JobSpec, trainer: Trainer, model: keras.Model) -> JobResult:
    ledger: Any = trainer.ledger.toPandas()
    counted = Counter(
        (row.worker, row.epoch, batch)
        for row in ledger.itertuples()
        for batch in range(row.first_batch, row.last_batch + 1)
    )
    due = {
        (worker, epoch, batch)
        for worker, batches in spec.batches.items()
        for epoch in range(spec.epochs)
        for batch in range(batches)
    }
    lost, strange = len(due - counted.keys()), len(counted.keys() - due)
    duplicated = sum(counted.values()) - len(counted)
    accuracy, wrong = spec.judge(model)
    problems = [wrong] if wrong else []
    if lost or duplicated or strange:
        problems.append(f"{lost} mini-batches lost, {duplicated} duplicated, {strange} that do not exist")
    if sorted(ledger.clock) != list(range(len(ledger))):
        problems.append("the ledger must have each tick of the clock once")
    history: Any = trainer.history.toPandas()
    if len(history) != spec.expected or history.samples.sum() != spec.rows * spec.epochs:
        problems.append(f"the history has {len(history)} mini-batches with {history.samples.sum()} samples")
    return JobResult(
        expected=spec.expected,
        committed=sum(counted.values()),
        lost=lost,
        duplicated=duplicated,
        attempts=len(ledger[["worker", "attempt"]].drop_duplicates()),
        incarnations=int(ledger.incarnation.max()),
        seconds=trainer.timings["total"],
        accuracy=accuracy,
        problems=tuple(problems),
    )


def _check_stream(spec: JobSpec, trainer: Trainer, model: keras.Model) -> JobResult:
    """Count how often each row moved its weight; the trainer's ledger covers only the last micro-batch."""
    counts, (_, wrong) = _counts(model, spec.rows), spec.judge(model)
    ledger: Any = trainer.ledger.toPandas()
    return JobResult(
        expected=spec.expected,
        committed=int(np.minimum(counts, spec.epochs).sum()),
        lost=int(np.maximum(spec.epochs - counts, 0).sum()),
        duplicated=int(np.maximum(counts - spec.epochs, 0).sum()),
        attempts=len(ledger[["worker", "attempt"]].drop_duplicates()),
        incarnations=int(ledger.incarnation.max()) if len(ledger) else 0,
        accuracy=None,
        problems=(wrong,) if wrong else (),
    )


def image_job(folder: Path, *, rows: int, epochs: int, rule: str = "asgd", units: int = 64) -> JobSpec:
    """Return a job with a small perceptron on Fashion-MNIST: real training, with an accuracy to compare.

    The server's rate decreases to zero over its clock, so that the final accuracy depends little on the order of the
    commits, and a wrong clock would change it.
    """
    from distkeras.data.datasets import fashion_mnist, write_parquet
    from distkeras.ps.rules import make
    from distkeras.ps.rules.schedules import Cosine

    (x, y), (x_test, y_test) = fashion_mnist()
    path = write_parquet(folder / "images", x[:rows], y[:rows], files=WORKERS)
    test = x_test / np.float32(255)

    def build() -> keras.Model:
        import keras

        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(units, activation="relu"), keras.layers.Dense(10, activation="softmax")]
        model = keras.Sequential([keras.Input((784,)), *layers])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def judge(model: keras.Model) -> tuple[float, str]:
        return 100 * float(model.evaluate(test, y_test, batch_size=1000, verbose=0, return_dict=True)["accuracy"]), ""

    momentum = getattr(make(rule), "momentum", 0.0)
    rate = Cosine(_RATE * (1 - momentum), length=rows * epochs // _BATCH)
    return JobSpec(f"images ({rule})", path, rows, epochs, _BATCH, rule, {"learning_rate": rate}, build, judge)


def counting_job(folder: Path, *, rows: int, epochs: int) -> JobSpec:
    """Return a job with a linear model over one-hot rows; its weights count how often each row moved the center.

    The loss is the sum of |label - output| with labels far below every output, so each row has a gradient of exactly 1
    at its own weight. With plain SGD at a rate of 1, DOWNPOUR adds -1 to it each time that the row is trained on. All
    numbers are small integers, so sums do not depend on the order of additions.
    """
    from distkeras.data.datasets import write_parquet

    path = write_parquet(folder / "counting", np.eye(rows, dtype=np.float32), np.full(rows, -1e4), files=WORKERS)
    build = counting_model(rows)
    return JobSpec("counting (downpour)", path, rows, epochs, 4, "downpour", {}, build, counts_of(rows, epochs))


def relays_job(folder: Path, *, rows: int, epochs: int) -> JobSpec:
    """Return the counting job in two groups, whose relays send the movements of their workers."""
    return replace(
        counting_job(folder, rows=rows, epochs=epochs), name="relays (downpour)", options={"relays": WORKERS - 1}
    )


def shards_job(folder: Path, *, rows: int, epochs: int) -> JobSpec:
    """Return the job on images with a center of three blocks, each of which is at a shard of its own."""
    spec = image_job(folder, rows=rows, epochs=epochs, units=200)
    return replace(spec, name="shards (asgd)", options=spec.options | {"shards": 3})


def members_job(folder: Path, *, rows: int, epochs: int, nodes: int = WORKERS) -> JobSpec:
    """Return the counting job under DASO, whose workers average parameters or gradients after each mini-batch.

    If each worker is a node, each row moves its weight by the share of one node in an epoch, whenever its mini-batch is
    trained. If all workers are in one node, the share is that of one gradient; each worker has one file of equal size.
    """
    from distkeras.ps.rules import make

    def judge(model: keras.Model) -> tuple[None, str]:
        counts = WORKERS * _counts(model)
        wrong = np.flatnonzero(np.abs(counts - epochs) > 1e-3)
        text = f"{wrong.size} of {rows} rows moved the center another number of times than {epochs}"
        return None, f"{text}: from {counts.min():g} to {counts.max():g}" if wrong.size else ""

    rule = make("daso", nodes=nodes, warm_up=epochs, cool_down=0, cast=False, momentum=0.0)
    return replace(
        counting_job(folder, rows=rows, epochs=epochs),
        name=f"members (daso, nodes: {nodes})",
        rule=rule,
        options={"partitioned_already": True},
        judge=judge,
    )


def counting_model(rows: int) -> Callable[[], keras.Model]:
    """Return a function that builds the model of `counting_job`."""

    def build() -> keras.Model:
        import keras

        inputs = keras.Input((rows,))
        model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs))
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanAbsoluteError(reduction="sum"))
        return model

    return build


def stream_job(folder: Path, *, rows: int, epochs: int, micro_batches: int) -> JobSpec:
    """Return the counting job as a stream of a folder that another process of this run may have written."""
    from distkeras.data.datasets import write_parquet

    path = folder / "stream"
    if not path.exists():
        write_parquet(path, np.eye(rows, dtype=np.float32), np.full(rows, -1e4), files=micro_batches)
    return JobSpec(
        "stream (downpour)",
        str(path),
        rows,
        epochs,
        2,
        "downpour",
        {},
        counting_model(rows),
        counts_of(rows, epochs),
        micro_batches=micro_batches,
    )


def wide_stream_job(folder: Path, *, rows: int, epochs: int, micro_batches: int) -> JobSpec:
    """Return a stream whose rows of data have ids of a table that no process holds, admitted by their second touch."""
    from distkeras.data.datasets import write_parquet

    path = folder / "wide-stream"
    if not path.exists():
        write_parquet(path, np.arange(rows)[:, None], np.full(rows, -1e4), files=micro_batches)

    def build() -> keras.Model:
        import keras

        from distkeras.layers import WideEmbedding

        inputs = keras.Input((1,), dtype="int64")
        table = WideEmbedding(1 << 40, 1, folder=str(folder / "wide-rows"), scale=0.0, admit_after=2, name=_TABLE)
        model = keras.Model(inputs, keras.layers.Flatten()(table(inputs)))
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanAbsoluteError(reduction="sum"))
        return model

    judge = counts_of(rows, epochs)
    name = "wide stream (downpour)"
    return JobSpec(name, str(path), rows, epochs, 2, "downpour", {}, build, judge, micro_batches=micro_batches)


def table_job(folder: Path, *, rows: int, epochs: int) -> JobSpec:
    """Return the counting job with a table that travels by rows; each row of data has its own row of the table."""
    from distkeras.data.datasets import write_parquet

    ids = np.arange(rows, dtype=np.int32)[:, None]
    path = write_parquet(folder / "table", ids, np.full(rows, -1e4), files=WORKERS)

    def build() -> keras.Model:
        import keras

        inputs = keras.Input((1,), dtype="int32")
        table = keras.layers.Embedding(rows, 1, embeddings_initializer="zeros", name="counts")
        model = keras.Model(inputs, keras.layers.Flatten()(table(inputs)))
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanAbsoluteError(reduction="sum"))
        return model

    options = {"tables": ["counts"]}
    return JobSpec("table (downpour)", path, rows, epochs, 4, "downpour", options, build, counts_of(rows, epochs))


def sequence_job(folder: Path, *, rows: int, epochs: int) -> JobSpec:
    """Return a counting job by rows of any length, whose model counts the steps of each row.

    Each row has its own id in all of its steps, so its row of the table moves by 1 for each of them. The label is below
    every output, also with the padding, which has an id of its own and is not judged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from distkeras import Padding

    lengths = np.array([1 + 7 * number % 12 for number in range(rows)])
    path = folder / "sequence"
    path.mkdir(parents=True)
    for file, numbers in enumerate(np.array_split(np.arange(rows), WORKERS)):
        values = [np.full(lengths[number], number + 1, np.int32) for number in numbers]
        labels = pa.array(np.full(len(numbers), -1e9, np.float32))
        table = pa.table({"features": pa.array(values, pa.list_(pa.int32())), "label": labels})
        pq.write_table(table, path / f"part-{file}.parquet")

    def build() -> keras.Model:
        import keras

        inputs = keras.Input((None,), dtype="int32")
        steps: Any = keras.layers.Embedding(rows + 1, 1, embeddings_initializer="zeros", name="counts")(inputs)
        model = keras.Model(inputs, keras.ops.sum(steps, axis=1))
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanAbsoluteError(reduction="sum"))
        return model

    def judge(model: keras.Model) -> tuple[None, str]:
        counts = _counts(model)[1:]
        wrong = np.flatnonzero(counts != epochs * lengths)
        text = f"the steps of {wrong.size} of {rows} rows moved the center another number of times than {epochs}"
        return None, f"{text}: {counts.sum():g} of {epochs * lengths.sum()} steps in all" if wrong.size else ""

    options = {"padding": Padding(bucket=True)}
    return JobSpec("sequence (downpour)", str(path), rows, epochs, 4, "downpour", options, build, judge)


def counts_of(rows: int, epochs: int) -> Callable[[keras.Model], tuple[None, str]]:
    """Return a judge of a model whose first weights count how often each row of data moved the center."""

    def judge(model: keras.Model) -> tuple[None, str]:
        counts = _counts(model, rows)
        wrong = np.flatnonzero(counts != epochs)
        if not wrong.size:
            return None, ""
        return None, (
            f"{wrong.size} of {rows} rows moved the center another number of times than {epochs}: "
            f"from {counts.min():g} to {counts.max():g}"
        )

    return judge


def _counts(model: keras.Model, rows: int = 0) -> np.ndarray:
    """Return how often each row moved the center, from the model's first weights.

    Of a model without weights, it is how often each of so many ``rows`` of its table was touched.
    """
    if model.weights:
        return -_weights(model)
    counts = np.zeros(rows)
    for row, value in _trained_rows(model).items():
        counts[row] = 1 - value  # the first touch moved nothing
    return counts


def _weights(model: keras.Model) -> np.ndarray:
    weights: np.ndarray = model.get_weights()[0].ravel()
    return weights


#: The name of the table of `wide_stream_job`.
_TABLE = "counts"


def _trained_rows(model: keras.Model) -> dict[int, float]:
    return _rows_in(model.get_layer(_TABLE).saved_rows)


def _rows_in(saved: SavedRows) -> dict[int, float]:
    from distkeras.keras_model.stored_rows import load_rows
    from distkeras.ps.protocol.tables import TableShape

    blocks = load_rows(saved, TableShape(_TABLE, 1 << 40, 1, 1, seed=0))
    return {int(row): float(value) for ids, rows in blocks for row, value in zip(ids, rows[:, 0], strict=True)}


def in_s3(spec: JobSpec, uri: str) -> JobSpec:
    """Return the same job with its checkpoints in S3."""
    return replace(spec, name=f"{spec.name}, its checkpoints in S3", s3=uri)


def in_cluster(spec: JobSpec) -> JobSpec:
    """Return the same job with its server as a task in the cluster."""
    return replace(spec, name=f"{spec.name}, its server in the cluster", options={**spec.options, "server": "cluster"})
