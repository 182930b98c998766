"""What a trainer sends to a job server in place of training here: its model, compiled, and its settings as JSON.

What has no such form is refused by its name before anything is sent: code of the user's own, rows that are in memory,
addresses of this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from typing import Any

from distkeras.callbacks import TimeBudget
from distkeras.job_server.client import JobClient, RemoteJob
from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.model_file import require_archive
from distkeras.job_server.schema import trainer_properties
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import Recipe
from distkeras.options import defaults_of
from distkeras.ps.rules import Rule, all_rules
from distkeras.ps.rules.schedules import Constant, Schedule
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.settings import TrainSettings
from distkeras.trainer import Trainer

#: Arguments of ``compile``, which travel with the model.
_COMPILED = {"worker_optimizer", "loss", "metrics", "loss_weights", "weighted_metrics"}


@dataclass(frozen=True)
class TrainerParts:
    """What a trainer consists of.

    Args:
        rule: the update rule.
        model_file: the model, as an archive.
        recipe: what it is compiled with.
        training: what acts on data and driver.
        worker: what each worker is told.
        server: what the parameter server is told.
    """

    rule: Rule
    model_file: bytes
    recipe: Recipe
    training: TrainSettings
    worker: WorkerSettings
    server: ServerSettings

    def description(self) -> dict[str, Any]:
        """Rule and options, JSON-ready: only what differs from the defaults.

        Raises:
            DescriptionError: a part cannot travel.
        """
        _require_known_rule(self.rule)
        for name, value, default in (
            ("decode", self.training.decode, None),
            ("frozen_weights", self.training.frozen_weights, None),
            ("resources", self.training.resources, None),
            ("host", self.training.host, None),
            ("port", self.server.port, 0),
            ("deadlines", self.worker.deadlines, Deadlines()),
        ):
            if value != default:
                raise _refused(name, f"not be given: it is of this machine, or code. Received: {name}={value!r}")
        defaults = defaults_of(Trainer)
        options = {name: value for name, value in self._options() if value != defaults[name]}
        return {"rule": self.rule.name, "hyper_parameters": self.rule.config(), "options": options}

    def model(self) -> bytes:
        """The model, compiled as the workers' would be, as an archive that a server takes.

        Raises:
            DescriptionError: it has classes or functions that are not Keras', or the compilation has.
        """
        if self.recipe.objects:
            names = ", ".join(sorted(self.recipe.objects))
            raise _refused("custom_objects", f"not be needed: code does not travel. Received: {names}")
        for name, value in self.recipe.arguments.items():
            for function in _functions(value):
                told = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
                raise _refused(name, f"be Keras' own, by name or as an object: code does not travel. Received: {told}")
        data = archive.to_bytes(self.recipe.build_to_train(self.model_file))
        require_archive(BytesIO(data))
        return data

    def _options(self) -> Iterator[tuple[str, Any]]:
        rate = self.server.learning_rate
        special: dict[str, Any] = {"learning_rate": rate.config() if isinstance(rate, Schedule) else rate}
        if type(rate) is Constant:
            special["learning_rate"] = rate.rate
        if self.training.class_weight is not None:
            special["class_weight"] = {str(label): weight for label, weight in self.training.class_weight.items()}
        settings = [
            {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
            for one in (self.server, self.worker, self.training)
        ]
        found = settings[0] | settings[1] | settings[2] | special
        for name in trainer_properties().keys() - _COMPILED:
            value = found[name]
            yield name, (value[0] if len(value) == 1 else list(value)) if isinstance(value, tuple) else value


def submit(
    parts: TrainerParts,
    server: str | JobClient,
    data: Any,
    token: str | None,
    callbacks: Sequence[Any],
    more: Mapping[str, Any],
) -> RemoteJob:
    """Sends what `Trainer.train` would run.

    Args:
        parts: of the trainer.
        server: its URL, or a client of it.
        data: path or URI of Parquet, as the server finds it.
        token: of the user; None: what the environment has.
        callbacks: only `TimeBudget`.
        more: further parts of the description.

    Raises:
        DescriptionError: a part cannot travel, which is named; or the server finds that it cannot work.
    """
    if not isinstance(data, str | PathLike):
        kind = f"{type(data).__module__}.{type(data).__qualname__}"
        raise _refused(
            "data", f"be the path or URI of Parquet that the server reads. Received: a {kind}, which is here"
        )
    budgets = [_budget_of(callback) for callback in callbacks]
    description = parts.description() | {"data": str(data)} | dict(more)
    if budgets:
        description["time_budget"] = min(budgets)
    model = parts.model()
    client = server if isinstance(server, JobClient) else JobClient(server, token)
    return client.send("/jobs", description, model)


def _budget_of(callback: Any) -> float:
    if type(callback) is not TimeBudget or callback.every_seconds is None:
        kind = callback if isinstance(callback, type) else type(callback)
        raise _refused("callbacks", f"be of `TimeBudget`: code and rows do not travel. Received: {kind.__name__}")
    return callback.every_seconds


def _require_known_rule(rule: Rule) -> None:
    if all_rules().get(rule.name) is not type(rule):
        raise _refused("rule", f"be one that the server knows: code does not travel. Received: {type(rule).__name__}")


def _functions(value: Any) -> Iterator[Any]:
    """The functions in an argument of ``compile`` that are not Keras'."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _functions(part)
    elif callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] != "keras":
        yield value


def _refused(name: str, expected: str) -> DescriptionError:
    return DescriptionError(f"`{name}` of a job that is sent must {expected}", name)
