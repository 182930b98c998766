"""A standalone Spark cluster with an executor on each of several hosts, and with speculative execution.

A task that has run for a while gets a second attempt on another host (`spark.speculation`): Spark does that on other
hosts only. The second attempt waits until the first one is lost, and then takes over.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark

from chaos.hosts import Hosts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_PATIENCE = 120.0
#: Seconds after which a task gets a second attempt.
_SPECULATION = 20
#: The line of Spark's log about each second attempt.
SECOND_ATTEMPT = "as speculatable"


class Cluster:
    """A master, and on each host a worker with room for one executor, until the cluster is closed.

    Args:
        hosts: the hosts of the workers.
        scratch: folder for the files of Spark.

    Attributes:
        url: address of the master.
    """

    def __init__(self, hosts: Hosts, scratch: Path) -> None:
        for name in ("work", "local", "tmp", "spark"):
            (scratch / name).mkdir()
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["SPARK_WORKER_DIR"] = str(scratch / "work")
        os.environ["SPARK_LOCAL_DIRS"] = str(scratch / "local")
        os.environ["TMPDIR"] = str(scratch / "tmp")
        # Executors are restarted often, so optimizations that make a JVM fast after minutes only cost time here.
        os.environ["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        self._hosts, self._scratch, self._slots = hosts, scratch, len(hosts.addresses)
        self._processes = ExitStack()
        try:
            self.url = self._start_master()
            for number in range(len(hosts.addresses)):
                self._start_worker(number)
        except BaseException:
            self.close()
            raise

    def _start_master(self) -> str:
        own = ["--host", self._hosts.driver, "--port", "0", "--webui-port", "0"]
        options = {"SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1"}
        log = self._start("master", [], ["org.apache.spark.deploy.master.Master", *own], options)
        return self._said(log, r"Starting Spark master at (\S+)")

    def _start_worker(self, host: int) -> None:
        address = self._hosts.addresses[host]
        own = ["--host", address, "--cores", str(self._slots), "--memory", "1g", "--webui-port", "0", self.url]
        command = ["org.apache.spark.deploy.worker.Worker", *own]
        log = self._start(f"worker-{host}", self._hosts.command(host), command, {"SPARK_LOCAL_IP": address})
        self._said(log, "(Successfully registered with master)")

    def _start(self, name: str, inside: list[str], command: list[str], variables: dict[str, str]) -> Path:
        log = self._scratch / "spark" / name
        with log.open("wb") as file:
            options: dict[str, Any] = {"env": os.environ | variables, "stdout": file, "stderr": file}
            process = subprocess.Popen([*inside, str(_SPARK_CLASS), *command], **options)
        self._processes.callback(_end, process)
        return log

    def _said(self, log: Path, pattern: str) -> str:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            found = re.search(pattern, log.read_text(errors="replace"))
            if found is not None:
                return found[1]
            time.sleep(0.1)
        raise TimeoutError(f"{log.name} must say {pattern!r}. Received: {log.read_text(errors='replace')[-2000:]}")

    def session(self) -> SparkSession:
        """Start Spark on this cluster; failed tasks are retried without a practical limit."""
        from pyspark.sql import SparkSession

        settings = {
            "spark.driver.memory": "2g",
            "spark.driver.host": self._hosts.driver,
            "spark.driver.bindAddress": self._hosts.driver,
            "spark.executor.memory": "1g",
            # The slots of one executor: as many as there are tasks, or Spark would not compare their durations.
            "spark.executor.cores": str(self._slots),
            "spark.local.dir": str(self._scratch / "local"),
            "spark.sql.warehouse.dir": str(self._scratch / "warehouse"),
            "spark.sql.shuffle.partitions": str(self._slots),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            # A task, or a stage whose input was lost with an executor, may be retried any number of times.
            "spark.task.maxFailures": "10000",
            "spark.stage.maxConsecutiveAttempts": "10000",
            "spark.excludeOnFailure.enabled": "false",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.speculation": "true",
            "spark.speculation.interval": "1s",
            "spark.speculation.task.duration.threshold": f"{_SPECULATION}s",
            # A dead executor's shuffle files are lost at once; a suspended or slow executor is not a dead one.
            "spark.shuffle.io.maxRetries": "2",
            "spark.shuffle.io.retryWait": "1s",
            "spark.network.timeout": "300s",
            "spark.locality.wait": "0s",
            "spark.sql.codegen.wholeStage": "false",
        }
        builder = SparkSession.builder.master(self.url).appName("distkeras chaos")
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to its JVM
        log4j = jvm.org.apache.logging.log4j
        # Its log reports second attempts; see `SECOND_ATTEMPT`.
        log4j.core.config.Configurator.setLevel("org.apache.spark.scheduler.TaskSetManager", log4j.Level.INFO)
        return spark

    def close(self) -> None:
        """End the processes of the cluster."""
        self._processes.close()


def stop_session(spark: SparkSession) -> None:
    """Stop Spark and its driver's JVM, which `stop` alone leaves running until Python ends."""
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - PySpark has no other way to its JVM's process
    spark.stop()
    with suppress(Exception):  # What matters is whether the process has ended, which is checked next.
        gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
