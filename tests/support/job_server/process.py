"""The job server as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from support.patience import patience, until
from support.present import present


class Server:
    """``distkeras serve`` in a folder, which a test can stop and start."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._options = folder, options or ("--master", "local[2,2]")
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        command = [sys.executable, "-m", "distkeras", "serve", "--folder", str(self.folder / "server")]
        command += ["--data", str(self.folder), "--port", "0", "--output", str(self.folder / "output")]
        command += self._options
        log = self.folder / "server.log"
        log.write_text("")
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, text=True)
        until(lambda: "listens at" in log.read_text() or present(self._process).poll() is not None)
        found = re.search(r"listens at (\S+)", log.read_text())
        assert found, log.read_text()
        self.url = found[1]

    @property
    def process(self) -> psutil.Process:
        """The process that serves now."""
        return psutil.Process(present(self._process).pid)

    def stop(self, name: signal.Signals = signal.SIGTERM) -> int:
        assert self._process is not None
        self._process.send_signal(name)
        return self._process.wait(patience(60))

    def ended(self) -> int:
        """Wait until the server ends by itself; return its exit status."""
        return present(self._process).wait(patience(300))

    @property
    def token(self) -> str:
        return (self.folder / "server" / "admin.token").read_text().strip()
