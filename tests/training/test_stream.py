"""Training on a stream: each row counts once, even if processes die and Spark sends a micro-batch again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.patience import brief, patience, until
from support.programs import environment
from support.training.small_jobs import counter, sgd
from support.training.spark_jobs import counting_model, counting_rows, counts, servers, total
from support.training.streams import arrive, arriving, forget_last_commit

from distkeras import KerasStreamModel, Network, Trainer, Versions
from distkeras.ps.errors import (
    ConfigurationError,
    DeadlineError,
    DifferentJobError,
    DistkerasError,
    LedgerError,
    ShapeError,
)
from distkeras.training.stream import StreamTraining

pytestmark = pytest.mark.usefixtures("nothing_left")

#: Rows of a micro-batch, and rows in total.
EACH, ROWS = 12, 48


def rows_of(number: int) -> range:
    return range(number * EACH, (number + 1) * EACH)


def train_available(trainer: Trainer, stream: DataFrame, checkpoint: Path) -> StreamTraining:
    training = trainer.train_stream(stream, checkpoint=checkpoint, trigger={"availableNow": True})
    assert training.awaitTermination(patience(120))
    assert not training.isActive
    assert training.exception() is None
    return training


def expected_counts(batches: int) -> list[float]:
    return [1.0] * EACH * batches + [0.0] * (ROWS - EACH * batches)


def test_each_row_counts_once_across_restarts(spark: SparkSession, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    for number in range(2):
        arrive(folder, number, rows_of(number), ROWS)
    stream, trainer = arriving(spark, folder), counter(rows=ROWS, num_epoch=1)
    training = train_available(trainer, stream, checkpoint)
    assert counts(training.model()) == expected_counts(2) == counts(trainer.model)
    progress = training.lastProgress
    assert progress is not None
    assert (progress.batch, progress.rows, progress.repeated) == (1, EACH, False)
    assert progress.steps == trainer.history.count() >= 2
    assert progress.lag is not None
    assert progress.lag > progress.seconds > 0.0

    # The driver died before Spark recorded the micro-batch as done: its rows are compared and not trained again.
    assert forget_last_commit(checkpoint) == 1
    training = train_available(counter(rows=ROWS, num_epoch=1), stream, checkpoint)
    assert counts(training.model()) == expected_counts(2)
    assert training.lastProgress is not None
    assert training.lastProgress.repeated

    # A stream runs until it is stopped; the next one includes the files that arrived in between.
    arrive(folder, 2, rows_of(2), ROWS)
    training = counter(rows=ROWS, num_epoch=1).train_stream(stream, checkpoint=checkpoint, query_name="counting")
    while training.lastProgress is None:
        assert training.isActive
        training.awaitTermination(1)  # one poll; the limit is the timeout of the test
    assert training.query.name == "counting"
    assert counts(training.model()) == expected_counts(3)
    training.stop()
    assert training.exception() is None
    assert counts(training.model()) == expected_counts(3)

    # Without its own part, the trainer would not know the rows that Spark has recorded as done.
    shutil.copytree(checkpoint, other_place := tmp_path / "half")
    shutil.rmtree(other_place / "center")
    with pytest.raises(DifferentJobError, match=r"must have two parts of the same time.*rows of micro-batches 0 to 2"):
        counter(rows=ROWS, num_epoch=1).train_stream(stream, checkpoint=other_place, trigger={"availableNow": True})

    # Another job is refused, and so is a micro-batch with other rows than those that were counted.
    for other, difference in (
        (counter(rows=ROWS, num_epoch=1, workers=3), "`num_workers` must be 2.* Received: 3"),
        (counter(rows=ROWS, num_epoch=1, batch_size=4), "`batch_size` must be 8"),
        (counter("agn", rows=ROWS, num_epoch=1), "`rule.name` must be 'downpour'"),
    ):
        with pytest.raises(DifferentJobError, match=difference):
            other.train_stream(stream, checkpoint=checkpoint)
    number = forget_last_commit(checkpoint)
    arrive(folder, number, rows_of(number + 1), ROWS)
    training = counter(rows=ROWS, num_epoch=1).train_stream(
        stream, checkpoint=checkpoint, trigger={"availableNow": True}
    )
    with pytest.raises(LedgerError, match="the input has not returned the same rows as before"):
        training.awaitTermination(patience(120))
    assert isinstance(training.exception(), LedgerError)

    # Without Spark's part of the checkpoint, the micro-batches would be numbered from 0 again.
    shutil.rmtree(checkpoint / "query")
    with pytest.raises(DifferentJobError, match="the stream must be the one that the checkpoint covers"):
        counter(rows=ROWS, num_epoch=1).train_stream(stream, checkpoint=checkpoint)


@pytest.mark.slow
def test_the_optimizers_state_survives_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    """One step per micro-batch with momentum 1/2, over a restart: the sums of halves are exact."""
    size, folder = 3, tmp_path / "in"

    def trainer() -> Trainer:
        optimizer = sgd(1.0, momentum=0.5)
        return Trainer(counting_model(size), "downpour", worker_optimizer=optimizer, loss=total, num_workers=1)

    arrive(folder, 0, [0], size)
    arrive(folder, 1, [1], size)
    stream = arriving(spark, folder)
    train_available(trainer(), stream, tmp_path / "checkpoint")
    arrive(folder, 2, [2], size)
    training = train_available(trainer(), stream, tmp_path / "checkpoint")
    *first, last = counts(training.model())
    assert (sorted(first), last) == ([1.5, 1.75], 1.0)  # files with the same time arrive in any order


@pytest.mark.slow
def test_invalid_arguments_are_refused_before_work(spark: SparkSession, tmp_path: Path) -> None:
    stream, trainer, checkpoint = arriving(spark, tmp_path), counter(rows=ROWS), tmp_path / "checkpoint"
    socket = spark.readStream.format("socket").option("host", "localhost").option("port", 9).load()
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: trainer.train_stream(counting_rows(spark, 3), checkpoint=checkpoint), "must be a streaming DataFrame"),
        (lambda: trainer.train_stream(socket, checkpoint=checkpoint), "sources that Spark can read again.* socket"),
        (lambda: trainer.train_stream(stream, checkpoint=None), "`checkpoint` must be given"),  # type: ignore[arg-type]  # that is tested
        (lambda: trainer.train_stream(stream, checkpoint=checkpoint, trigger={"every": "1 s"}), "keywords of"),
        (lambda: trainer.train_stream(stream, checkpoint=checkpoint, trigger="1 s"), "a dictionary"),  # type: ignore[arg-type]  # that is tested
        (lambda: trainer.train(stream), "`Trainer.train_stream`"),
        (lambda: counter(partitioned_already=True).train_stream(stream, checkpoint=checkpoint), "must be False"),
        (
            lambda: counter(tables=["ids"]).train_stream(stream, checkpoint=checkpoint),
            "names of Embedding layers",
        ),
        (
            lambda: Trainer(
                counting_model(3), "downpour", loss=total, num_workers=2, network=Network(server="cluster")
            ).train_stream(stream, checkpoint=checkpoint),
            "`server` must be 'driver'",
        ),
    ]
    for call, text in refused:
        with pytest.raises(ConfigurationError, match=text):
            call()
    with pytest.raises(ShapeError):
        counter(rows=ROWS).train_stream(stream.selectExpr("label AS features", "label"), checkpoint=checkpoint)
    assert not checkpoint.exists()
    sums = stream.groupBy("features").agg({"label": "sum"}).withColumnRenamed("sum(label)", "label")
    with pytest.raises(ConfigurationError, match=r"each row is sent once .output mode append"):
        trainer.train_stream(sums, checkpoint=checkpoint)


@pytest.mark.slow
def test_an_error_of_a_row_ends_the_stream_with_its_column(spark: SparkSession, tmp_path: Path) -> None:
    arrive(tmp_path / "in", 0, rows_of(0), ROWS)
    stream = arriving(spark, tmp_path / "in").selectExpr("features", "float('nan') AS label")
    training = counter(rows=ROWS, num_epoch=1).train_stream(stream, checkpoint=tmp_path / "checkpoint")
    with pytest.raises(DistkerasError, match="label"):
        training.awaitTermination(patience(120))
    assert counts(training.model()) == [0.0] * ROWS


@contextmanager
def driving(folder: Path, rows: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program `stream_driver`; kill it at the end, with the JVM and its workers."""
    program = Path(__file__).parents[1] / "support" / "training" / "stream_driver.py"
    command = [sys.executable, str(program), str(folder), str(rows)]
    driver = subprocess.Popen(command, env=environment(), start_new_session=True)
    try:
        yield driver
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(patience(30))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixty_micro_batches_while_everything_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    each, batches = 6, 60
    for number in range(batches):
        arrive(tmp_path / "in", number, range(number * each, (number + 1) * each), each * batches)
    commits = tmp_path / "checkpoint" / "query" / "commits"

    def done() -> int:
        return max((int(path.name) for path in commits.glob("[0-9]*")), default=-1) + 1

    def wait_while_running(condition: Callable[[], bool], driver: subprocess.Popen[bytes]) -> None:
        until(lambda: condition() or driver.poll() is not None, 180)
        assert driver.poll() is None

    def hold(name: str, driver: subprocess.Popen[bytes], after: int) -> int:
        """Make the driver or a worker wait once ``after`` micro-batches are done; return its process id."""
        pid = tmp_path / f"pid-{name}"
        wait_while_running(lambda: done() >= after, driver)
        pid.unlink(missing_ok=True)
        (tmp_path / f"hold-{name}").touch()
        wait_while_running(lambda: pid.exists() and pid.read_text() != "", driver)
        return int(pid.read_text())

    def go(name: str) -> None:
        (tmp_path / f"held-{name}").unlink()

    def kill_server() -> None:
        (server,) = servers()
        os.kill(server, signal.SIGKILL)
        wait_while_running(lambda: server not in servers(), driver)

    after = 0
    for round_number in range(2):
        with driving(tmp_path, each * batches) as driver:
            after += 2
            os.kill(hold("worker", driver, after), signal.SIGKILL)  # a worker within a mini-batch
            go("worker")
            after += 2
            hold("worker", driver, after)
            kill_server()  # within a micro-batch
            go("worker")
            after += 2
            hold("driver", driver, after)
            kill_server()  # after a snapshot that covers the micro-batch
            go("driver")
            after += 2
            name = "worker" if round_number % 2 else "driver"  # before such a snapshot, or after it
            hold(name, driver, after)
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait(patience(30))
            go(name)
    with driving(tmp_path, each * batches) as driver:
        assert driver.wait(patience(300)) == 0
    assert done() == batches
    assert json.loads((tmp_path / "counts").read_text()) == [1.0] * each * batches


@pytest.mark.slow
def test_both_halves_of_the_checkpoint_lie_in_the_folder_that_was_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a b ü+#%20[é"
    (tmp_path / "in").mkdir()
    arrive(tmp_path / "in", 0, rows_of(0), ROWS)
    stream = arriving(spark, tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    training = counter(rows=ROWS, num_epoch=1).train_stream(
        stream, checkpoint=name, publish=f"{name} versions", trigger={"availableNow": True}
    )
    monkeypatch.chdir(tmp_path / "in")  # the folders stay those that were named
    assert training.awaitTermination(patience(120))
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"{name} versions", "in"]
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["center", "query"]
    assert KerasStreamModel(tmp_path / f"{name} versions", custom_objects={"total": total}).published == [0]
    # A URI is the same folder, and so is a path with a link in it.
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for place, repeated in (((tmp_path / name).as_uri(), 1), (str(tmp_path / "link" / ".." / name), 1)):
        forget_last_commit(tmp_path / name)
        training = train_available(counter(rows=ROWS, num_epoch=1), stream, place)  # type: ignore[arg-type]  # a text
        assert counts(training.model()) == expected_counts(repeated)
        assert training.lastProgress is not None
        assert training.lastProgress.repeated


@pytest.mark.slow
def test_a_stop_that_cancels_a_micro_batch_is_no_failure(spark: SparkSession, tmp_path: Path) -> None:
    arrive(tmp_path / "in", 0, rows_of(0), ROWS)
    trainer = counter(rows=ROWS, num_epoch=1_000_000)
    training = trainer.train_stream(arriving(spark, tmp_path / "in"), checkpoint=tmp_path / "checkpoint")
    until(lambda: sum(counts(training.model())))
    with contextlib.suppress(DeadlineError):  # Spark may take longer to cancel
        training.stop(timeout=brief(0.5))
    assert training.awaitTermination(patience(120))
    assert training.exception() is None
    assert sum(counts(training.model()))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_a_checkpoint_of_two_times_is_refused_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    folder, whole, first = (tmp_path / name for name in ("in", "whole", "first"))
    folder.mkdir()
    stream = arriving(spark, folder)
    for numbers in ((0,), (1, 2)):
        for number in numbers:
            arrive(folder, number, rows_of(number), ROWS)
        train_available(counter(rows=ROWS, num_epoch=1), stream, whole)
        if number == 0:
            shutil.copytree(whole, first)
    damaged, gone, older, query = (tmp_path / name for name in ("damaged", "gone", "older", "query"))
    for copy in (damaged, gone, older, query):
        shutil.copytree(whole, copy)
    flip(max((damaged / "center").glob("snapshot-*.dks")))
    shutil.rmtree(gone / "center")
    for changed, half in ((older, "center"), (query, "query")):
        shutil.rmtree(changed / half)
        shutil.copytree(first / half, changed / half)
    for checkpoint, found in (
        (damaged, r"has the rows of micro-batch 2, while Spark has recorded them"),
        (gone, r"has the rows of micro-batches 0 to 2, while Spark"),
        (older, r"has the rows of micro-batches 1 to 2, while Spark"),
        (query, r"contain micro-batches 1 to 2, which Spark has not recorded as done"),
    ):
        # No row has arrived, so that Spark would never call the trainer.
        with pytest.raises(DifferentJobError, match=f"must have two parts of the same time.*{found}"):
            counter(rows=ROWS, num_epoch=1).train_stream(stream, checkpoint=checkpoint, trigger={"availableNow": True})

    # The way that the error names: Spark sends the missing micro-batches again.
    for name, kept in (("commits", 2), ("offsets", 3)):
        for path in (damaged / "query" / name).glob("[0-9]*"):
            if int(path.name) >= kept:
                path.unlink()
                (path.parent / f".{path.name}.crc").unlink(missing_ok=True)
    arrive(folder, 3, rows_of(3), ROWS)
    assert counts(train_available(counter(rows=ROWS, num_epoch=1), stream, damaged).model()) == [1.0] * ROWS


@pytest.mark.slow
def test_a_server_that_dies_between_two_micro_batches_is_restarted_to_end_the_stream(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder, checkpoint, versions = tmp_path / "in", tmp_path / "checkpoint", tmp_path / "versions"
    folder.mkdir()
    arrive(folder, 0, rows_of(0), ROWS)
    arrive(folder, 1, rows_of(1), ROWS)
    stream = arriving(spark, folder)

    def killed(after: int, *, damaged: bool) -> StreamTraining:
        training = counter(rows=ROWS, num_epoch=1).train_stream(
            stream, checkpoint=checkpoint, publish=Versions(str(versions), every=2)
        )
        until(lambda: (checkpoint / "query" / "commits" / str(after)).exists())
        (server,) = servers()
        os.kill(server, signal.SIGKILL)
        if damaged:
            flip(max((checkpoint / "center").glob("snapshot-*.dks")))
        training.stop()
        return training

    training = killed(1, damaged=False)
    assert training.exception() is None
    assert counts(training.model()) == expected_counts(2)
    model = KerasStreamModel(versions, custom_objects={"total": total})
    assert model.published == [0, 1]

    # The driver died before it published the last version, which no later micro-batch brings.
    next(versions.glob("version-0000000001-*.dks")).unlink()
    training = counter(rows=ROWS, num_epoch=1).train_stream(
        stream, checkpoint=checkpoint, trigger={"availableNow": True}, publish=Versions(str(versions), every=2)
    )
    assert training.awaitTermination(patience(120))
    assert model.published == [0, 1]
    assert counts(model.at(1).keras_model) == expected_counts(2)

    # A snapshot that is damaged meanwhile is an error, not an older model.
    arrive(folder, 2, rows_of(2), ROWS)
    training = killed(2, damaged=True)
    error = training.exception()
    assert isinstance(error, DifferentJobError)
    assert "no snapshot that can be read has the rows of micro-batch 2" in str(error)
