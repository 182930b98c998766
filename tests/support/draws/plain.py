"""The same training in plain Keras: the user's own model, a call a mini-batch, and each rule's formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from distkeras.keras_model.variables import moving_statistics
from distkeras.ps.rules import Rule
from support.draws.jobs import Prepared, as_keras
from support.draws.models import ROWS, STEPS
from support.ps import transcriptions
from support.ps.transcriptions import Problem


class Expected(NamedTuple):
    """What a job of one worker must end with."""

    center: np.ndarray
    statistics: np.ndarray
    history: dict[str, np.ndarray]


def vector(variables: list[Any]) -> np.ndarray:
    """Return variables as one vector, float64."""
    values = [np.asarray(keras.ops.convert_to_numpy(variable)).astype(np.float64).ravel() for variable in variables]
    return np.concatenate(values) if values else np.empty(0)


def assign(variables: list[Any], values: np.ndarray) -> None:
    """Set variables to the parts of one vector."""
    at = 0
    for variable in variables:
        size = int(np.prod(variable.shape))
        variable.assign(values[at : at + size].reshape(tuple(variable.shape)))
        at += size


class PlainJob(Problem):
    """A `Problem` whose gradients are steps of a Keras model on its mini-batches, in their order.

    For a rule whose steps have a momentum of their own, a gradient is the step divided by the learning rate; for all
    others the learning rate is 1, so that a gradient is the step itself, of any optimizer.
    """

    def __init__(self, prepared: Prepared, rule: Rule) -> None:
        traits = rule.traits
        window = rule.window if isinstance(rule.window, int) else STEPS
        if rule.probes or traits.peers:
            window = 1  # the server of one worker is never occupied; a node takes each step alone
        self.n, self.weight_decay, self.window = 1, 0.0, window
        self.schedule = [0] * (STEPS // window)
        self._prepared, self._with_rate = prepared, traits.gradient or traits.peers
        self._model = prepared.built.model
        self.start = vector(self._model.trainable_variables)
        self.rows: list[dict[str, float]] = []
        self._rates: list[float] = []
        self.eta = self._eta

    def _eta(self, clock: int) -> float:
        if not self._with_rate:
            return 1.0
        while len(self._rates) <= clock:
            self._rates.append(self._rate())
        return self._rates[clock]

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self._model.optimizer.learning_rate))

    def g(self, k: int, theta: np.ndarray) -> np.ndarray:
        model, batch = self._model, self._prepared.batches[len(self.rows)]
        assign(model.trainable_variables, theta)
        rate = self._eta(len(self.rows))
        model.reset_metrics()
        logs = self._step(*as_keras(self._prepared.built, batch))
        self.rows.append({name: float(value) for name, value in logs.items()})
        return (theta - vector(model.trainable_variables)) / rate

    def _step(self, x: Any, y: Any, weight: Any = None) -> dict[str, Any]:
        """Take one step; by `fit` if the model has a step of its own, which then receives no weights of None."""
        model = self._model
        if type(model).train_step is keras.Model.train_step:
            logs: dict[str, Any] = model.train_on_batch(x, y, weight, return_dict=True)
            return logs
        kept = model.fit(x, y, sample_weight=weight, batch_size=ROWS, shuffle=False, verbose=0)
        return {name: values[0] for name, values in kept.history.items()}

    def numbered(self, k: int, theta: np.ndarray, batch: int) -> np.ndarray:
        return self.g(k, theta)

    def occupied(self, k: int) -> bool:
        return False

    def rounds(self) -> Iterator[tuple[int, list[int]]]:
        for clock in range(len(self.schedule)):
            yield clock, [0]


#: Hyper-parameters that a formula takes under another name, or not at all.
_OWN = {"daso": "nag_asgd"}


def expected(prepared: Prepared, rule: Rule, hyper: dict[str, Any]) -> Expected:
    """Train the user's model, which is compiled, on all mini-batches by the formula of a rule."""
    job = PlainJob(prepared, rule)
    given = dict(hyper)
    if "rho" in given:  # the elastic move has a rate of its own
        given["rho"] *= given.pop("learning_rate")
        given.setdefault("momentum", 0.9) if rule.name == "eamsgd" else None
    config = rule.config()
    if rule.name == "daso":
        given = {"momentum": config["momentum"]}
    if rule.name == "dana_dc":
        given = {"momentum": config["momentum"], "compensation": config["compensation"]}
    if "window" in given:
        given["window"] = job.window if rule.window is None else rule.window
    *_, center = getattr(transcriptions, _OWN.get(rule.name, rule.name))(job, **given)
    rows = {name: np.array([row[name] for row in job.rows]) for name in job.rows[0]}
    return Expected(center, vector(moving_statistics(prepared.built.model)), rows)
