"""A program that runs a `JobRunner`, to be killed: ``runner_process.py DATABASE FILES [LEASE [SLOTS]]``."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from distkeras.job_server.runner.files import JobFiles
from distkeras.job_server.runner.runner import JobRunner
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.jobs import JobStore
from distkeras.job_server.store.tables import open_database

STUB = (sys.executable, str(Path(__file__).with_name("stub_driver.py")))

if __name__ == "__main__":
    engine = open_database(sys.argv[1])
    lease, slots = [*sys.argv[3:], *("30", "4")[len(sys.argv) - 3 :]]
    settings = Settings(slots=int(slots), driver_command=STUB, lease=float(lease))
    runner = JobRunner(JobStore(engine), JobFiles(Path(sys.argv[2])), settings)
    runner.run(threading.Event())
