"""The server as the driver's own process: it shares no interpreter lock with the driver, and dies with it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import distkeras
from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.errors import ConfigurationError, DeadlineError, ServerLostError
from distkeras.ps.events import Events, hand_on, record_of
from distkeras.ps.protocol.handshake import KEY_BYTES
from distkeras.ps.rules import Rule
from distkeras.ps.rules.schedules import Schedule, schedule_of
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.tls import make_certificate

log = logging.getLogger(__name__)

#: Seconds for the process to come up, to end, to end with a last snapshot, and between two tries at a taken port.
_START, _END, _END_SAVING, _AGAIN = 30.0, 10.0, 120.0, 0.2
#: Servers of a job with a checkpoint that may die before they are up.
_TRIES = 3


class ServerProcess:
    """A parameter server for one job, with a fresh random key.

    The child serves until its standard input ends. That is `close`, or the death of the driver in any way: the
    kernel closes the pipe. So no server outlives its driver. The key, and the private key of
    a certificate, go through the same pipe, never through arguments or the environment.

    What the child logs is given to this process' loggers of the same names, with level and time; what else it writes to
    its standard error, to this module's.

    Args:
        rule: the update rule.
        workers: number of workers of the job.
        learning_rate: the server's, a number or a schedule over its clock (gradient rules).
        staleness_bound: iterations that a worker may be ahead of the slowest; None: no bound.
        measure_gap: record the gap of each commit.
        max_skipped: commits with a NaN or infinity that are left out before one of them ends the job.
        host: address to bind, which the executors must be able to reach.
        port: 0 for one that is free.
        deadlines: of every wait of the server.
        checkpoint: where to save the server's state, so that `restart` can go on from it; None: nowhere.
        resume: go on with the job whose snapshots ``checkpoint`` holds, if there are any. Else there must be none.
        job: JSON-ready facts that a job which resumes must share.
        epochs: of the job.
        tls: encrypt every connection, with a certificate made for this job.
        events: collects the events that the child logs.

    Raises:
        ConfigurationError: a setting that cannot work, a port that cannot be bound, snapshots of another job, or
            ``tls`` without the package cryptography.
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
        max_skipped: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        deadlines: Deadlines | None = None,
        checkpoint: Checkpoint | None = None,
        resume: bool = False,
        job: dict[str, Any] | None = None,
        epochs: int | None = None,
        tls: bool = False,
        events: Events | None = None,
    ) -> None:
        self._events = events or Events()
        key = secrets.token_bytes(KEY_BYTES)
        certificate = make_certificate() if tls else None
        self.checkpoint = checkpoint
        self.deadlines = deadlines or Deadlines()
        self._settings: dict[str, Any] = {
            "rule": rule.name,
            "hyper_parameters": rule.config(),
            "workers": workers,
            "learning_rate": None if learning_rate is None else schedule_of(learning_rate).config(),
            "staleness_bound": staleness_bound,
            "measure_gap": measure_gap,
            "max_skipped": max_skipped,
            "host": host,
            "port": port,
            "key": key.hex(),
            "tls": certificate and dataclasses.asdict(certificate),
            "deadlines": dataclasses.asdict(self.deadlines),
            "checkpoint": checkpoint and dataclasses.asdict(checkpoint),
            "job": job,
        }
        self._lives = 0
        #: Where the center stands that a snapshot was found of: clock, incarnation, exact, epoch. None: a new one.
        self.resumed: dict[str, Any] | None = None
        life = StartMode(fresh=not resume, same_attempts=False, epochs=epochs)
        for left in reversed(range(_TRIES if checkpoint else 1)):
            try:
                facts = self._start(life)
                break
            except ServerLostError:  # it was killed before it had anything to lose
                if not left:
                    raise
        self._settings["port"] = facts["port"]
        self.address = Address(facts["host"], facts["port"], key, certificate.certificate if certificate else "")

    def _start(self, life: StartMode) -> dict[str, Any]:
        home = str(Path(distkeras.__file__).resolve().parents[1])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        # One BLAS thread: the finite check must not take a core from the workers beside it.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distkeras.ps", "driven"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self._listener = threading.Thread(
            target=self._listen, args=(self._process.stderr,), name=f"distkeras-log-{self._process.pid}", daemon=True
        )
        self._listener.start()
        try:
            self._write(json.dumps(self._settings | {"life": dataclasses.asdict(life)}).encode() + b"\n")
            facts = json.loads(self._read_line())
        except BaseException:
            self._process.kill()
            self.close()
            raise
        if "error" in facts:
            self.close()
            kind = _PortTakenError if facts["busy"] else ConfigurationError
            raise kind(f"the parameter server must start. Received: {facts['error']}")
        self.resumed = None if facts["clock"] is None else facts
        self._lives = max(self._lives + 1, facts.get("incarnation", 1))
        return facts

    def restart(self) -> None:
        """Starts a dead server again, at the same address, from its latest snapshot: see `resumed`.

        Raises:
            ServerLostError: there are no snapshots to go on from.
            ConfigurationError: the port was taken meanwhile.
            DeadlineError: the process did not come up.
        """
        if self.checkpoint is None:
            raise ServerLostError("without a `checkpoint` the server must live as long as the job. Received: its end")
        self.close()
        deadline = time.monotonic() + _START
        while True:
            try:
                self._start(StartMode(after=self._lives))
                return
            except _PortTakenError:
                # The system may have lent the port to somebody's call for a moment.
                if time.monotonic() + _AGAIN > deadline:
                    raise
                time.sleep(_AGAIN)

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

    @property
    def exit_code(self) -> int | None:
        """What the process ended with, minus the signal's number if one killed it; None while it runs."""
        return self._process.poll()

    def exited(self, timeout: float) -> bool:
        """Whether the process has ended, or does so within ``timeout`` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Ends the process and waits for it; the port is free afterwards."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # a process that is gone has not read all that it was sent
                self._process.stdin.close()
        try:
            self._process.wait(_END if self.checkpoint is None else _END_SAVING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._listener.join(_END)  # it has read to the end then

    def _listen(self, stream: io.BufferedReader) -> None:
        with stream:
            for line in io.TextIOWrapper(stream, "utf-8", "replace"):
                record = record_of(line)
                if record is None:
                    log.warning("the parameter server: %s", line.rstrip())
                    continue
                self._events.add(record, "server")
                hand_on(record)

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


class _PortTakenError(ConfigurationError):
    """Somebody else has the port."""
