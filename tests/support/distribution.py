"""Which of several processes runs which files of tests."""

from __future__ import annotations

import functools
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling


def _takers(path: Path, names: Set[str]) -> frozenset[str]:
    """Return the names of a file's functions that take an argument of one of these names."""
    pattern = re.compile(rf"def (\w+)\([^)]*\b(?:{'|'.join(names)})\b")
    return frozenset(pattern.findall(path.read_text(encoding="utf-8")))


@functools.cache
def _fixtures_of_spark(folder: Path) -> frozenset[str]:
    """Return the Spark session's name and those of the fixtures, of this folder and those above it, that take it."""
    above = frozenset({"spark"}) if folder.parent == folder else _fixtures_of_spark(folder.parent)
    conftest = folder / "conftest.py"
    return above | _takers(conftest, above) if conftest.is_file() else above


@functools.cache
def _needs_spark(path: Path) -> bool:
    return bool(_takers(path, _fixtures_of_spark(path.parent)))


class SparkApart(LoadFileScheduling):
    """Whole files, in their order, as ``--dist=loadfile`` has it; but those with the Spark session to half of them.

    The other processes start none, which costs more than most tests, and take the tests that wait as often as they
    compute: a core is seldom idle while they do. They end when only files with the session are left.
    """

    def _next(self, node: Any) -> str | None:
        """Return the file that a process should take next; None if it should take none of those that are left."""
        with_spark = int(node.gateway.id.removeprefix("gw")) < -(-self.numnodes // 2)
        alike = (scope for scope in self.workqueue if _needs_spark(Path(self.config.rootpath, scope)) == with_spark)
        return next(alike, next(iter(self.workqueue), None) if with_spark else None)

    def _assign_work_unit(self, node: Any) -> None:
        if (scope := self._next(node)) is None:
            node.shutdown()
        else:
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)
