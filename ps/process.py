"""The server as the driver's own process: it shares no interpreter lock with the driver, and dies with it."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import select
import subprocess
import sys
import time
from pathlib import Path

import distkeras
from distkeras.ps.channel import Deadlines
from distkeras.ps.client import Address
from distkeras.ps.errors import ConfigurationError, DeadlineError, ServerLostError
from distkeras.ps.rules import Rule
from distkeras.ps.schedules import Schedule, schedule_of
from distkeras.ps.wire import KEY_BYTES

_START, _END = 30.0, 10.0


class ServerProcess:
    """A parameter server for one job, with a fresh random key.

    The child serves until its standard input ends. That is `close`, or the death of the driver in any way: the
    kernel closes the pipe. So no server outlives its driver. The key goes through the same pipe, never through
    arguments or the environment.

    Args:
        rule: the update rule.
        workers: number of workers of the job.
        learning_rate: the server's, a number or a schedule over its clock (gradient rules).
        staleness_bound: iterations that a worker may be ahead of the slowest; None: no bound.
        measure_gap: record the gap of each commit.
        host: address to bind, which the executors must be able to reach.
        port: 0 for one that is free.
        deadlines: of every wait of the server.

    Raises:
        ConfigurationError: a setting that cannot work, or a port that cannot be bound.
        DeadlineError: the process did not come up.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        workers: int,
        learning_rate: float | Schedule | None = None,
        staleness_bound: int | None = None,
        measure_gap: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
        deadlines: Deadlines | None = None,
    ) -> None:
        key = secrets.token_bytes(KEY_BYTES)
        settings = {
            "rule": rule.name,
            "hyper_parameters": rule.config(),
            "workers": workers,
            "learning_rate": None if learning_rate is None else schedule_of(learning_rate).config(),
            "staleness_bound": staleness_bound,
            "measure_gap": measure_gap,
            "host": host,
            "port": port,
            "key": key.hex(),
            "deadlines": dataclasses.asdict(deadlines or Deadlines()),
        }
        home = str(Path(distkeras.__file__).resolve().parents[1])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        # One BLAS thread: the finite check must not take a core from the workers beside it.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distkeras.ps", "driven"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        try:
            self._write(json.dumps(settings).encode() + b"\n")
            answer = json.loads(self._read_line())
        except BaseException:
            self._process.kill()
            self.close()
            raise
        if "error" in answer:
            self.close()
            raise ConfigurationError(f"the parameter server must start. Received: {answer['error']}")
        self.address = Address(answer["host"], answer["port"], key)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process and waits for it; the port is free afterwards."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServerLostError("the parameter server must start. Received: its end") from None

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + _START
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise DeadlineError(f"waited {_START:g} s for the parameter server to start")
            piece = os.read(descriptor, 4096)
            if not piece:
                raise ServerLostError(f"the parameter server must start. Received: exit {self._process.wait(_END)}")
            line += piece
        return line
