"""A trainer in the form that a job server accepts: its compiled model, and its settings as JSON.

Settings without such a form are refused by name before anything is sent: the user's code, rows in memory, addresses of
this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

from distkeras.data.padding import padding_json
from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.model_file import require_archive
from distkeras.keras_model import archive
from distkeras.keras_model.keras_config import applied
from distkeras.keras_model.recipe import PackedObject
from distkeras.ps.rules import all_rules
from distkeras.ps.rules.schedules import Constant, Schedule
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.settings import defaults_of, options_of
from distkeras.trainer import Trainer

#: Keywords of `Trainer` that a job cannot set: code, and addresses, files and the terminal of the driver's machine.
LEFT_OUT = {
    *("model", "rule", "custom_objects", "decode", "deadlines", "frozen_weights"),
    *("server", "host", "port", "progress", "log_every", "check_model", "resources"),
}
#: Arguments of ``compile``, which are part of the model's archive.
_COMPILED = {"worker_optimizer", "loss", "metrics", "loss_weights", "weighted_metrics"}


def description_of(trainer: Trainer) -> dict[str, Any]:
    """Return the parts of a job's description that ``trainer`` determines, JSON-ready.

    They contain the rule, and the options that differ from the defaults.
    """
    if all_rules().get(trainer.rule.name) is not type(trainer.rule):
        kind = type(trainer.rule).__name__
        raise _refused("rule", f"be a rule of distkeras, because a job contains no code. Received: {kind}")
    for name, value, default in (
        ("decode", trainer.settings.decode, None),
        ("frozen_weights", trainer.settings.frozen_weights, None),
        ("resources", trainer.settings.resources, None),
        ("host", trainer.settings.host, None),
        ("port", trainer.server_settings.port, 0),
        ("deadlines", trainer.worker_settings.deadlines, Deadlines()),
    ):
        if value != default:
            raise _refused(
                name, f"not be given, because it is code, or only applies to this machine. Received: {name}={value!r}"
            )
    defaults = defaults_of(Trainer)
    options = {name: value for name, value in _options(trainer) if value != defaults[name]}
    return {"rule": trainer.rule.name, "hyper_parameters": trainer.rule.config(), "options": options}


def model_of(trainer: Trainer) -> bytes:
    """Return the archive of the model, compiled like the workers'; raise DescriptionError if it contains code."""
    recipe = trainer.recipe
    if recipe.objects:
        names = ", ".join(sorted(recipe.objects))
        raise _refused("custom_objects", f"not be needed, because a job contains no code. Received: {names}")
    if recipe.undecayed:
        raise _refused(
            "optimizer",
            "be described by its configuration, which is what a job contains. Received: one that excludes "
            f"{len(recipe.undecayed)} variables from weight decay",
        )
    for name, part in ((name, part) for name, value in recipe.arguments.items() for part in _parts(value)):
        if isinstance(part, PackedObject) and part.attributes:
            _, attribute, content = part.attributes[0]
            expected = "be described by its configuration, which is what a job contains. Received: one with "
            raise _refused(name, f"{expected}{attribute}={content!r}")
        if callable(part) and str(getattr(part, "__module__", "")).partition(".")[0] != "keras":
            text = f"{part.__module__}.{getattr(part, '__qualname__', part)}"
            raise _refused(
                name, f"be Keras' own, by name or as an object, because a job contains no code. Received: {text}"
            )
    with applied(recipe.settings):
        data = archive.to_bytes(recipe.build(trainer.model_file, to_train=True))
    data = archive.with_attributes(data, archive.attributes_in(trainer.model_file))
    require_archive(BytesIO(data))
    return data


def _options(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    training, rate = trainer.settings, trainer.server_settings.learning_rate
    special: dict[str, Any] = {"learning_rate": rate.config() if isinstance(rate, Schedule) else rate}
    if type(rate) is Constant:
        special["learning_rate"] = rate.rate
    if training.class_weight is not None:
        special["class_weight"] = training.class_weight_json
    special["padding"] = padding_json(training.padding)
    settings: dict[str, Any] = {}
    for group in (trainer.server_settings, trainer.worker_settings, training):
        settings |= {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    settings |= special
    for name in options_of(Trainer).keys() - LEFT_OUT - _COMPILED:
        value = settings[name]
        yield name, (value[0] if len(value) == 1 else list(value)) if isinstance(value, tuple) else value


def _parts(value: Any) -> Iterator[Any]:
    """Yield the parts of an argument of ``compile``: of its lists and dictionaries, or itself."""
    if isinstance(value, Mapping | list | tuple) and not isinstance(value, PackedObject):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _parts(part)
    else:
        yield value


def _refused(name: str, expected: str) -> DescriptionError:
    return DescriptionError(f"`{name}` of a submitted job must {expected}", name)
