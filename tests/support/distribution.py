"""The distribution of test files over processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling


def _takers(path: Path, names: Set[str]) -> frozenset[str]:
    """Return the names of a file's functions that have a parameter with one of these names."""
    pattern = re.compile(rf"def (\w+)\([^)]*\b(?:{'|'.join(names)})\b")
    return frozenset(pattern.findall(path.read_text(encoding="utf-8")))


@functools.cache
def _fixtures_of_spark(folder: Path) -> frozenset[str]:
    """Return the names of the Spark session and of fixtures of this folder and those above it that use it."""
    above = frozenset({"spark"}) if folder.parent == folder else _fixtures_of_spark(folder.parent)
    conftest = folder / "conftest.py"
    return above | _takers(conftest, above) if conftest.is_file() else above


@functools.cache
def _needs_spark(path: Path) -> bool:
    return path.is_file() and bool(_takers(path, _fixtures_of_spark(path.parent)))


#: Folders whose files share what is slow to make: the parsed sources, and the built distributions.
TOGETHER = ("tests/conventions", "tests/packaging")


class SparkApart(LoadFileScheduling):
    """Whole files in their order, as with ``--dist=loadfile``; but only half of the processes run files that use Spark.

    The other processes start no Spark session, which costs more than most tests, and take the tests that mostly wait,
    so that a core is seldom idle. They end when only files that use Spark are left. Some folders are given to a process
    as a whole, for what their files share.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Return the file, or the folder, of a test."""
        return next((folder for folder in TOGETHER if nodeid.startswith(f"{folder}/")), super()._split_scope(nodeid))

    def _next(self, node: Any) -> str | None:
        """Return the file that a process should run next, or None if it should run none of the remaining files."""
        with_spark = int(node.gateway.id.removeprefix("gw")) < -(-self.numnodes // 2)
        alike = (scope for scope in self.workqueue if _needs_spark(Path(self.config.rootpath, scope)) == with_spark)
        return next(alike, next(iter(self.workqueue), None) if with_spark else None)

    def _assign_work_unit(self, node: Any) -> None:
        if (scope := self._next(node)) is None:
            node.shutdown()
        else:
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)
