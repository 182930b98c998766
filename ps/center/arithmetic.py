"""Arithmetic that raises a typed error where numpy would compute an infinity or NaN."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from distkeras.ps.errors import NonFiniteError


class CheckedArithmetic:
    """A context manager that raises NonFiniteError at an overflow or an invalid operation of numpy; not thread-safe."""

    def __init__(self, rule: str, *, enabled: bool) -> None:
        self._rule = rule
        self.enabled = enabled
        #: Whether an error was raised: the vectors may be updated in part.
        self.failed = False
        self._where: tuple[int, int | None, int] = (-1, None, 0)
        self._flags = np.errstate()

    def of(self, worker: int, step: int | None, clock: int) -> CheckedArithmetic:
        """Return this object, for a commit of ``worker``; the arguments are for the text of an error."""
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
                f"rule {self._rule!r} made the center non-finite at clock {clock}: {error}. "
                "Lower the learning rate or clip gradients",
                worker=worker,
                step=step,
            ) from error
