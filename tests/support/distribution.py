"""Which of several processes runs which files of tests."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

#: A test or fixture that takes the session.
_SPARK = re.compile(r"def \w+\([^)]*\bspark\b", re.DOTALL)


@functools.cache
def _needs_spark(path: Path) -> bool:
    return _SPARK.search(path.read_text(encoding="utf-8")) is not None


class SparkApart(LoadFileScheduling):
    """Whole files, in their order, as ``--dist=loadfile`` has it; but those with the Spark session to half of them.

    The other processes start none, which costs more than most tests, and take the tests that wait as often as they
    compute: a core is seldom idle while they do.
    """

    def _assign_work_unit(self, node: Any) -> None:
        place, of_spark = self.nodes.index(node), -(-len(self.nodes) // 2)
        for scope in self.workqueue:
            if _needs_spark(Path(self.config.rootpath, scope)) == (place < of_spark):
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)
