"""Windows in proportion to the workers' speeds: dynamic local updates (DyLU).

Reference: Liu et al. 2024 (arXiv 2401.09135), Equation 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

#: By how much a quotient may lie below a whole number and be taken for it: times are sums of rounded numbers.
_ROUNDING = 1e-9


def window_by_speed(longest: int, speed: float | None, speeds: Iterable[float | None]) -> int:
    r"""Return the steps of a worker's next window: :math:`H_k = \max(1, \lfloor H v_k / v_{\max} \rfloor)`.

    Args:
        longest: H, the window of the fastest worker.
        speed: v_k, the worker's own, steps per second; None: it is not measured, and gets H.
        speeds: those of all active workers, the worker's own among them.
    """
    if speed is None:
        return longest
    fastest = max(other for other in speeds if other is not None)
    return max(1, math.floor(longest * (speed / fastest) * (1 + _ROUNDING)))
