"""What is compared: the runs, and how much work each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BATCH_SIZE = 128


@dataclass(frozen=True)
class RunConfig:
    """One line of the table.

    Args:
        title: what it is called.
        rate: learning rate of SGD, at each worker; it falls to 0.
        rule: name of the update rule; None for plain Keras.
        options: its hyper-parameters.
    """

    title: str
    rate: float
    rule: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The learning rate and the rule's, by name."""
        return {"learning_rate": self.rate, **self.options}


# SGD without momentum everywhere, plain Keras included: the formulas of the papers hold for it as printed, and no
# optimizer's state hides what a rule does. AGN and ADAG divide a window's movement by its steps: window times the plain
# rate moves the center as far as plain Keras goes. AEASGD's elastic move is learning_rate * rho; for n workers, n times
# that should not be above 1.
RUNS = (
    RunConfig("plain Keras", 0.1),
    RunConfig("DOWNPOUR", 0.1, "downpour", {"window": 1}),
    RunConfig("AGN", 0.2, "agn", {"window": 2}),
    RunConfig("ADAG", 0.2, "adag", {"window": 2, "gamma": 1e-4}),
    RunConfig("DynSGD", 0.1, "dynsgd", {"window": 4}),
    RunConfig("AEASGD", 0.15, "aeasgd", {"window": 10, "rho": 3.0}),
)


@dataclass(frozen=True)
class WorkSize:
    """How much work it is: hidden layers of the model, training rows, and passes over them."""

    hidden: tuple[int, ...]
    rows: int
    epochs: int


FULL = WorkSize(hidden=(1000, 2000, 1000), rows=60_000, epochs=4)
QUICK = WorkSize(hidden=(128,), rows=20_000, epochs=1)
