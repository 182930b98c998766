"""A driver that is killed during a job while a child, forked by a callback, keeps all its descriptors open."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.patience import patience
from support.programs import environment

DRIVER = """
import json, os, signal, sys
from pyspark.sql import SparkSession
import keras
from support.training.spark_jobs import *
from distkeras import Callback, Network, Trainer

spark = (
    SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false").getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")


class Forks(Callback):
    forked = False

    def on_center(self, context):
        if context.clock and not self.forked:
            self.forked = True
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            print(json.dumps({"child": child, "server": servers()}), flush=True)


trainer = Trainer(
    counting_model(8), "downpour", worker_optimizer=keras.optimizers.SGD(1.0), loss=total,
    num_workers=1, batch_size=8, num_epoch=1_000_000, network=Network(port=int(sys.argv[1])),
)
trainer.train(counting_rows(spark, 8), callbacks=[Forks(every_commits=1)])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="waits for a process that is no child")
def test_the_server_of_a_killed_driver_ends_and_frees_its_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(script), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        text=True,
    )
    processes = {"child": 0}
    try:
        assert driver.stdout is not None
        assert select.select([driver.stdout], [], [], patience(100))[0], "the training does not start"
        processes = json.loads(driver.stdout.readline())
        (server,) = processes["server"]
        descriptor = os.pidfd_open(server)
        driver.kill()
        driver.wait(patience(10))
        assert select.select([descriptor], [], [], patience(10))[0]
        os.close(descriptor)
        assert psutil.Process(processes["child"]).status() != psutil.STATUS_ZOMBIE
        with socket.create_server(("127.0.0.1", port)):
            pass
    finally:
        driver.kill()
        if processes["child"]:
            os.kill(processes["child"], signal.SIGKILL)
        if driver.stdout is not None:
            driver.stdout.close()
