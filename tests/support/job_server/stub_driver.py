"""A driver of jobs that trains nothing and does what the job's name says: ``stub_driver.py FOLDER ATTEMPT``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distkeras.job_server.runner.processes import LeaseRenewal

#: A process in a process group of its own, as Spark's Python workers are, that ignores SIGTERM.
STUBBORN = (
    "import os, signal, sys, time; os.setpgid(0, 0); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
)


#: The memory of a driver that grows.
HELD: list[bytes] = []


def main(folder: Path, attempt: int) -> int:
    if sys.stdin.readline() != "go\n":
        return 3
    with LeaseRenewal(folder / f"beat-{attempt}", folder / "fence", attempt):
        return work(folder, attempt)


def work(folder: Path, attempt: int) -> int:
    order = json.loads((folder / f"order-{attempt}.json").read_text())
    todo = order["description"]["name"].split()
    (folder / f"begun-{attempt}").touch()
    with (folder / "progress.jsonl").open("a") as progress:
        kind = "predicting" if order["kind"] == "predict" else "training"
        progress.write(json.dumps({"time": 0, "kind": kind, "attempt": attempt}) + "\n")
    (folder / f"working-{attempt}").touch()
    prepare(folder, todo)
    if "wait" in todo:
        (folder / "waits").touch()
        while not (folder / "go-on").exists():
            time.sleep(0.01)
    if "die" in todo or ("once" in todo and attempt == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdout.write("the end\n")
    sys.stdout.flush()
    sent = (folder / "sent.keras").read_bytes() if (folder / "sent.keras").exists() else b"model"
    (folder / "model.keras").write_bytes(sent)
    failed = {"state": "failed", "type": "ShapeError", "error": "the rows must fit"}
    result = failed if "fail" in todo else {"state": "done", "summary": {"last_epoch": {"epoch": 2, "loss": 0.5}}}
    partial = folder / "partial"
    partial.write_text(json.dumps(result))
    partial.rename(folder / f"result-{attempt}.json")
    if "linger" in todo:
        time.sleep(600)
    return 0


def prepare(folder: Path, todo: list[str]) -> None:
    """Perform the steps that come before the work itself."""
    if "environment" in todo:
        (folder / "environment").write_text(json.dumps(dict(os.environ)))
    if "children" in todo:
        subprocess.Popen([sys.executable, "-c", STUBBORN, str(folder / "child")])
        while not (folder / "child").exists() or not (folder / "child").read_text():
            time.sleep(0.01)
    if "stubborn" in todo:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "grow" in todo:
        HELD.append(bytes(range(256)) * (1 << 18))  # 64 MB, with each page written.
    if "print" in todo:
        sys.stdout.write("".join(f"line {number}\n" for number in range(10_000)))
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
