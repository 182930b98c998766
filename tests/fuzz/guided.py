"""Coverage-guided inputs for the parser; needs the package atheris."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from distkeras.ps.protocol.framing import Connection, Reader
from fuzz.inputs import Inputs
from fuzz.parser import Target


def guided(seconds: int, seed: int) -> int:
    """Feed inputs that atheris finds by coverage to the parser; return its exit status."""
    import atheris

    def one(data: bytes) -> None:
        if len(data) > 1:
            Target(Target.KINDS[data[0] % len(Target.KINDS)]).feed(data[2:], 1 + data[1])

    with tempfile.TemporaryDirectory() as folder:
        for number, whole in enumerate(Inputs(seed).corpus):
            Path(folder, str(number)).write_bytes(bytes([number % len(Target.KINDS), 255]) + whole)
        child = os.fork()  # atheris ends the process.
        if child == 0:
            for holder in (Reader, Connection):
                for name, method in vars(holder).copy().items():
                    if callable(method) and not name.startswith("__"):
                        setattr(holder, name, atheris.instrument_func(method))
            settings = [f"-max_total_time={seconds}", f"-seed={seed + 1}", "-max_len=2048"]
            atheris.Setup([sys.argv[0], *settings, folder], one)
            atheris.Fuzz()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
