"""A search over settings in rungs: all train a little, the best of them more, and one to the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distkeras.ps.errors import ConfigurationError, LocalProtocolError, NonFiniteError
from distkeras.ps.validate import invalid, require_choice, require_integer
from distkeras.shown import Shown, rounded


class SearchTrial:
    """One setting of a `SuccessiveHalving`.

    Attributes:
        number: the position of its setting, from 0.
        setting: as it was given.
        epochs: epochs that it must be trained for in its present rung, those of the rungs before among them.
        values: what was reported, by those epochs; empty in the first rung.
    """

    def __init__(self, number: int, setting: Any, epochs: int) -> None:
        self.number, self.setting, self.epochs = number, setting, epochs
        self.values: dict[int, float] = {}

    def report(self, value: float) -> None:
        """Take in the value of the metric after `epochs` epochs; NaN or infinity: the setting has failed.

        Raises:
            ConfigurationError: no number.
        """
        try:
            self.values[self.epochs] = float(value)
        except (TypeError, ValueError):
            raise invalid("value", value, "a number") from None

    @property
    def value(self) -> float:
        """The value that was reported last; NaN: none."""
        return self.values[max(self.values)] if self.values else math.nan

    def __repr__(self) -> str:
        return f"SearchTrial(number={self.number}, setting={self.setting!r}, epochs={self.epochs}, value={self.value})"


class SuccessiveHalving(Shown):
    """Find a good setting without training all settings to the end, by synchronous successive halving.

    ::

        search = SuccessiveHalving([0.01, 0.1, 1.0], epochs=16, first_epochs=2, mode="max")
        for rung in search:
            for trial in rung:                         # in any order, or several at once
                accuracy = train(trial.setting, epochs=trial.epochs)
                trial.report(accuracy)
        search.best.setting

    Iteration yields the rungs. In the first rung, all settings are trained for ``first_epochs``. Of n trials, the best
    ``max(1, n // factor)`` are promoted to the next rung, which has ``factor`` times the epochs; the last rung has
    ``epochs``. If a single trial is left, it is promoted to the last rung. A job with a checkpoint continues exactly
    where it stopped in the previous rung: ``trainer.train(df, checkpoint=…, resume=bool(trial.values))`` with a larger
    ``num_epoch``.

    The order of the settings does not matter. Trials with equal values are promoted or dropped together: if there is
    room for only some of them, all are promoted, unless they are the worst ones and others are better. A trial that
    has failed is never promoted.

    Args:
        settings: the settings to compare, such as learning rates: at least one, objects of any kind.
        epochs: epochs of a trial that is never dropped.
        first_epochs: epochs of the first rung, at most ``epochs``.
        factor: factor by which the number of trials falls and the epochs grow from rung to rung, at least 2.
        mode: "min" if smaller values are better, "max" if larger ones are.

    Raises:
        ConfigurationError: An argument is invalid.
        LocalProtocolError: The next rung was requested before all trials of the last one had reported.
        NonFiniteError: All trials of a rung have failed.

    Reference:
        Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, 2016, figure 3;
        Li et al., Hyperband, 2018, section 3.
    """

    def __init__(
        self, settings: Sequence[Any], epochs: int, *, first_epochs: int = 1, factor: int = 4, mode: str
    ) -> None:
        self.settings = list(settings)
        if not self.settings:
            raise ConfigurationError("`settings` must have at least one setting. Received: none")
        self.epochs = require_integer("epochs", epochs)
        self.first_epochs = require_integer("first_epochs", first_epochs, 1, self.epochs)
        self.factor = require_integer("factor", factor, 2)
        require_choice("mode", mode, ("min", "max"))
        self.mode = mode
        #: Trials of the rung that ended last, the best one first.
        self.ranking: list[SearchTrial] = []

    def _facts(self) -> Mapping[str, Any]:
        """Return what is compared, and the best setting so far."""
        best = self.ranking[0] if self.ranking else None
        ranked = {} if best is None else {"best": best.setting, "value": rounded(best.value), "after": best.epochs}
        return {"settings": len(self.settings), "epochs": self.epochs, "mode": self.mode, **ranked}

    @property
    def best(self) -> SearchTrial:
        """The best trial of the last rung that has ended; of equal ones, the trial whose setting comes first.

        Raises:
            LocalProtocolError: No rung has ended yet.
        """
        if not self.ranking:
            raise LocalProtocolError("`best` must be asked for after a rung of the search. Received: none has ended")
        return self.ranking[0]

    def __iter__(self) -> Iterator[list[SearchTrial]]:
        epochs = self.first_epochs
        trials = [SearchTrial(number, setting, epochs) for number, setting in enumerate(self.settings)]
        self.ranking = []
        while True:
            yield list(trials)
            self.ranking = self._ranked(trials)
            if epochs == self.epochs:
                return
            promoted = self._promoted(max(1, len(trials) // self.factor))
            trials = sorted(promoted, key=lambda trial: trial.number)
            epochs = self.epochs if len(trials) == 1 else min(self.epochs, self.factor * epochs)
            for trial in trials:
                trial.epochs = epochs

    def _ranked(self, trials: Sequence[SearchTrial]) -> list[SearchTrial]:
        """Return the trials that have not failed, the best one first."""
        missing = [trial.number for trial in trials if trial.epochs not in trial.values]
        if missing:
            raise LocalProtocolError(
                f"`report` must be called for each trial before the next rung. Received: no value of trials {missing} "
                f"after {trials[0].epochs} epochs"
            )
        finite = [trial for trial in trials if math.isfinite(trial.value)]
        if not finite:
            values = {trial.number: trial.value for trial in trials}
            raise NonFiniteError(f"no trial has a finite value after {trials[0].epochs} epochs: {values}")
        return sorted(finite, key=lambda trial: trial.value, reverse=self.mode == "max")  # stable: by number

    def _promoted(self, count: int) -> list[SearchTrial]:
        """Return the best ``count`` trials, or those that equal values make of them."""
        if len(self.ranking) <= count:
            return self.ranking
        last = self.ranking[count - 1].value
        tied = [trial for trial in self.ranking if trial.value == last]
        better = self.ranking[: self.ranking.index(tied[0])]
        dropped = len(better) + len(tied) > count and better and tied[-1] is self.ranking[-1]
        return better if dropped else better + tied  # dropped: such as all that predict one class
