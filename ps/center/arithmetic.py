"""What fails within a commit leaves it applied in part, which is noted here.

A NaN or infinity is found at the operation that makes it of finite numbers, at no pass over the vectors.
"""

from __future__ import annotations

from types import TracebackType

import numpy as np

from distkeras.ps.errors import NonFiniteError


class CheckedArithmetic:
    """Raises within ``with`` where numpy's flags tell of an overflow or an invalid operation; for one thread at a time.

    Args:
        rule: name of the rule whose arithmetic it is.
        enabled: False: numbers are not checked.
    """

    def __init__(self, rule: str, *, enabled: bool) -> None:
        self._rule = rule
        self.enabled = enabled
        #: Whether something was raised: what the arithmetic wrote may be written in part.
        self.failed = False
        self._where: tuple[int, int | None, int] = (-1, None, 0)
        self._flags = np.errstate()

    def of(self, worker: int, step: int | None, clock: int) -> CheckedArithmetic:
        """This very object, about to be entered for a commit of ``worker``; all three are for the error."""
        self._where = worker, step, clock
        return self

    def __enter__(self) -> None:
        if self.enabled:
            self._flags = np.errstate(over="raise", divide="raise", invalid="raise")
            self._flags.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.failed = self.failed or error is not None
        if not self.enabled:
            return
        self._flags.__exit__(kind, error, trace)
        if isinstance(error, ArithmeticError):
            worker, step, clock = self._where
            raise NonFiniteError(
                f"rule {self._rule!r} must keep the center finite. Received: {error}, at clock {clock}",
                worker=worker,
                step=step,
            ) from error
