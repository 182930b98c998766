"""A server that announces itself, as a process of its own: one of several attempts to serve a job.

``python announced_server.py REQUEST PUBLICATION ATTEMPT GIVEN_UP SHARD`` serves what the two files contain. Its last
line is what the server returns: a `StartReport`, or nothing. With SHARD, the process is that shard of such a server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from distkeras.ps.server.announced import serve_announced
from distkeras.ps.server.process import StartRequest
from distkeras.ps.server.start_report import StartReport, report_from_json, report_to_json
from distkeras.ps.shards.shard_task import DividedAmongTasks, ShardTask
from support.patience import patience, until


class AnnouncedServer:
    """One attempt, which runs until it ends by itself or is killed.

    Args:
        folder: the folder for its files.
        request, publication, attempt, given_up: see `serve_announced`.
        shard: the process is this shard of such a server; None: it is the server.
    """

    def __init__(
        self,
        folder: Path,
        request: StartRequest,
        publication: bytes,
        attempt: int = 0,
        given_up: int = 0,
        shard: int | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "request").write_text(request.to_json())
        (folder / "publication").write_bytes(publication)
        arguments = [str(folder / "request"), str(folder / "publication"), str(attempt), str(given_up)]
        arguments += [] if shard is None else [str(shard)]
        support = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])},
            text=True,
        )

    def __enter__(self) -> AnnouncedServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()

    def kill(self) -> None:
        """Kill the process; return when it has ended."""
        self.process.kill()
        self.process.wait(patience(30))

    def stop(self) -> None:
        """Suspend the process; return when it is suspended."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        """Resume the process."""
        self.process.send_signal(signal.SIGCONT)

    def returned(self) -> StartReport | None:
        """Return the server's result once it has ended successfully."""
        out, _ = self.process.communicate(timeout=patience(60))
        assert self.process.returncode == 0
        line = out.strip()
        return report_from_json(line) if line else None


def main() -> None:
    """Serve the job described by the arguments."""
    file, publication, attempt, given_up, *shard = sys.argv[1:]
    request = StartRequest.from_json(Path(file).read_text())
    if shard:
        ShardTask(request, int(shard[0])).serve()
        return
    report = serve_announced(
        request,
        Path(publication).read_bytes(),
        attempt=int(attempt),
        given_up=int(given_up),
        kind=None if request.settings.shards == 1 else DividedAmongTasks(request),
    )
    sys.stdout.write("" if report is None else report_to_json(report))


if __name__ == "__main__":
    main()
