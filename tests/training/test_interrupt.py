"""Ctrl-C ends a job and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import patience, until
from support.programs import environment

INTERRUPTED = """
import json, os, socket, sys, traceback
from pyspark.sql import SparkSession
import keras
from support.training.spark_jobs import *
from distkeras import Network, Trainer

fifo, port = sys.argv[1], int(sys.argv[2])
spark = (
    SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false").getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")

def tell(step):
    if step == 5:
        with open(fifo, "w") as file:
            file.write("training")

trainer = Trainer(
    counting_model(8, step_callback_layer(tell)), "downpour", worker_optimizer=keras.optimizers.SGD(1.0), loss=total,
    num_workers=1, batch_size=8, num_epoch=1_000_000, network=Network(port=port),
)
try:
    trainer.train(counting_rows(spark, 8))
    outcome = "returned"
except KeyboardInterrupt as error:
    outcome = "".join(traceback.format_exception(error))
active = list(spark.sparkContext.statusTracker().getActiveJobsIds())
assert_nothing_left()
with socket.create_server(("127.0.0.1", port)):
    pass
print(json.dumps({
    "outcome": outcome, "active": active, "counts": counts(trainer.model), "batches": trainer.history.count(),
}))
spark.range(10).count()  # the session still works
spark.stop()
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_job_and_keeps_the_center(tmp_path: Path) -> None:
    """After a SIGINT to a driver's process, the Spark job ends, the port is free, and the center is available."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    script = tmp_path / "driver.py"
    script.write_text(INTERRUPTED)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    driver = subprocess.Popen(
        [sys.executable, str(script), str(fifo), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        text=True,
    )
    try:
        until(lambda: select.select([reader], [], [], 0)[0] or driver.poll() is not None, 100)
        assert driver.poll() is None, "the driver ended before training began"
        driver.send_signal(signal.SIGINT)
        output, _ = driver.communicate(timeout=patience(60))
    finally:
        os.close(reader)
        driver.kill()
        driver.wait()
    state = json.loads(output.splitlines()[-1])
    assert driver.returncode == 0
    *frames, said = state["outcome"].splitlines()
    assert len(frames) <= 6
    assert re.fullmatch(
        r"KeyboardInterrupt: the job was interrupted after [\d,]+ commits, in epoch \d+\. "
        r"The center's weights are in `model` of the trainer\.",
        said,
    )
    assert state["active"] == []
    assert min(state["counts"]) >= 5
    assert set(state["counts"]) == {float(state["batches"])}
