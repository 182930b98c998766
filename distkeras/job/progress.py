"""A progress bar on the driver; silent where nobody watches."""

from __future__ import annotations

import math
import sys
from types import TracebackType

from tqdm.std import tqdm

from distkeras.ps.protocol.messages import Status


class Progress:
    """Shows mini-batches, samples a second, loss and staleness while a job runs.

    Args:
        shown: True, False, or None: on a terminal and in a notebook.
    """

    def __init__(self, shown: bool | None = None) -> None:
        if shown is None:
            shown = sys.stderr.isatty() or _in_notebook()
        self._bar: tqdm = tqdm(unit="batch", disable=not shown, desc="training", dynamic_ncols=True)
        self._samples = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, status: Status) -> None:
        """Takes in what the server tells."""
        if self._bar.disable:
            return
        elapsed = self._bar.format_dict["elapsed"]
        rate = status.samples / elapsed if elapsed > 0 else math.nan
        self._bar.set_postfix_str(
            f"{rate:,.0f} samples/s, loss {status.loss:.4f}, staleness {status.staleness:.1f}", refresh=False
        )
        self._bar.update(status.batches - self._bar.n)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    instance = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return instance is not None and "IPKernelApp" in instance.config
