"""Spark's standalone cluster, as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyspark

from support.patience import patience, until

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_DEPLOY = "org.apache.spark.deploy"
_OWN = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")


@contextlib.contextmanager
def master(folder: Path) -> Iterator[str]:
    """Start Spark's master, with its log in ``folder``; yield its URL."""
    with daemon(folder / "master", f"{_DEPLOY}.master.Master", *_OWN):
        yield said(folder / "master", "Starting Spark master at ")


@contextlib.contextmanager
def worker(log: Path, url: str, cores: int = 1) -> Iterator[None]:
    """Start a worker, and wait until the master has registered it; executors have the environment of this process."""
    with daemon(log, f"{_DEPLOY}.worker.Worker", *_OWN, "--cores", str(cores), "--memory", "1g", url):
        said(log, "Successfully registered with master ")
        yield


@contextlib.contextmanager
def two_hosts(folder: Path, cores: int) -> Iterator[str]:
    """Start a master and a worker on each of two hosts, which here are two loopback addresses; yield the URL."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(master(folder))
        for host in ("127.0.0.1", "127.0.0.2"):
            options = ("--host", host, "--cores", str(cores), "--memory", "1g", "--webui-port", "0", url)
            stack.enter_context(daemon(folder / host, f"{_DEPLOY}.worker.Worker", *options))
            said(folder / host, "Successfully registered with master ")
        yield url


@contextlib.contextmanager
def daemon(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start one of Spark's own processes, with its output in ``log``."""
    directory = log.parent
    environment = os.environ | {"SPARK_WORKER_DIR": str(directory / "work"), "SPARK_LOG_DIR": str(directory)}
    with log.open("wb") as file:
        process = subprocess.Popen([SPARK_CLASS, *arguments], stderr=file, stdout=file, cwd=directory, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(patience(30))


def said(log: Path, pattern: str) -> str:
    """Return the text after ``pattern`` in a line of ``log``, once there is one."""
    found: list[str] = []
    until(lambda: found.extend(re.findall(rf"{pattern}(\S+)\s", log.read_text())) or found)
    return found[0]
