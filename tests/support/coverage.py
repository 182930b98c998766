"""Pickling of functions that SlipCover measures, so that Spark can send them to its workers."""

from __future__ import annotations

import copyreg
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from slipcover import probe


def let_probes_travel() -> None:
    """Let Spark pickle a function that is measured: its lines have probes, which record nothing in a worker."""
    copyreg.pickle(type(probe.new(*_nowhere())), lambda _: (probe.new, _nowhere()))


def _nowhere() -> tuple[Any, ...]:
    """Return arguments of a probe that records nothing; all of them can be pickled."""
    return SimpleNamespace(newly_seen=defaultdict(set), deinstrument_seen=list), "", 0, 50
