"""The options of `Trainer` as flags; and any options as a TOML file."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distkeras.data.schema import BALANCED
from distkeras.keras_model.optimizers import optimizer_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import json_or_text
from distkeras.settings import Option, grouped, options_of
from distkeras.trainer import Trainer

#: Flag to keyword, where they differ.
RENAMED = {
    "features": "features_col",
    "label": "label_col",
    "sample_weight": "sample_weight_col",
    "workers": "num_workers",
    "epochs": "num_epoch",
    "server_learning_rate": "learning_rate",
}
#: Keywords that are no flags of their own; the worker optimizer is two, its name and its arguments.
LEFT_OUT = {"model", "rule", "worker_optimizer", "decode", "custom_objects", "deadlines", "resources"}

_FLAGS = {keyword: flag for flag, keyword in RENAMED.items()}


class TomlArgumentParser(argparse.ArgumentParser):
    """A parser with ``--config``: a TOML file whose keys are flags' names with underscores; flags win over it.

    The file's values pass through the parser too, so that they are checked like flags.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--config", metavar="FILE", help="TOML file with the options below as keys")

    def parse_with_file(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options of the command line and, before it, of the file that it names.

        Raises:
            ConfigurationError: the file cannot be read, or has a key that is no option.
            SystemExit: from argparse, with its message and status 2.
        """
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        config = first.parse_known_args(argv)[0].config
        return self.parse_args([*(self._arguments_of(config) if config else ()), *argv])

    def options(self) -> dict[str, argparse.Action]:
        """Return what a file may set, by its keys."""
        keys = {action.option_strings[0][2:].replace("-", "_"): action for action in self._actions}
        return {key: action for key, action in keys.items() if key not in ("help", "config", "h")}

    def _arguments_of(self, path: str) -> Iterator[str]:
        """Yield the command line that says the same as a TOML file."""
        options = self.options()
        for key, value in _read_toml(path).items():
            option = options.get(key)
            if option is None:
                raise ConfigurationError(f"each key of {path} must be one of {', '.join(options)}. Received: {key}")
            flag = option.option_strings[0]
            if option.type is _pair:
                if not isinstance(value, Mapping):
                    raise ConfigurationError(f"`{key}` in {path} must be a table. Received: {key}={value!r}")
                texts = [f"{name}={json.dumps(part, default=str)}" for name, part in value.items()]
                yield from [flag, *texts] if texts else []
            elif isinstance(option, argparse.BooleanOptionalAction):
                if not isinstance(value, bool):
                    raise ConfigurationError(f"`{key}` in {path} must be true or false. Received: {key}={value!r}")
                yield flag if value else option.option_strings[1]
            elif option.nargs == "+":
                if isinstance(value, Mapping):
                    value = [f"{name}={part}" for name, part in value.items()]
                yield from [flag, *map(str, value if isinstance(value, list) else [value])]
            else:
                yield f"{flag}={value}"


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"`--config` must be a TOML file. Received: --config {path}: {error}") from error


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = (text, "=", "") if text == BALANCED else text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE. Received: {text!r}")
    return name, value


def columns_of(texts: Sequence[str], *, optional: bool = False) -> Any:
    """Return a mapping where each text is NAME=COLUMN and there are several; else the columns as they are.

    Args:
        optional: NAME= is for an output without a column, whose entry is None.
    """
    pairs = [text.partition("=") for text in texts]
    if len(texts) > 1 and all(name and separator and (column or optional) for name, separator, column in pairs):
        return {name: column or None for name, _, column in pairs}
    return list(texts)


def values_of(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return NAME=VALUE pairs as a mapping; the last of a name counts. Values are JSON where they can be, else text."""
    return {name: json_or_text(text) for name, text in pairs}


#: A flag and its opposite; NAME=VALUE pairs, any number of times.
SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
PAIRS: dict[str, Any] = {"nargs": "+", "action": "extend", "type": _pair, "default": [], "metavar": "NAME=VALUE"}

#: Columns in the model's order; or NAME=COLUMN for each of its inputs or outputs.
COLUMNS: dict[str, Any] = {"nargs": "+", "metavar": "COLUMN"}

#: What a flag takes: by the keyword's annotation, or by its name.
_KINDS: dict[str, dict[str, Any]] = {
    "bool": SWITCH,
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "float | Schedule": {"type": float, "metavar": "X"},
    "str": {},
    "Any": {},
    "int | str": {"type": json_or_text, "metavar": "N"},
    "str | Sequence[str] | Mapping[str, str]": COLUMNS,
    "label_col": {"nargs": "*", "metavar": "COLUMN"},
    "str | Sequence[str]": {"nargs": "+", "metavar": "NAME"},
    "Sequence[Any]": {"nargs": "+", "metavar": "NAME"},
    "Mapping[int, float] | str": PAIRS | {"metavar": "CLASS=VALUE"},
    "loss_weights": {"nargs": "+", "type": float, "metavar": "X"},
    "sample_weight_col": COLUMNS,
}


def add_trainer_flags(parser: Any) -> None:
    """Add a flag for each option of `Trainer`, with its docstring's first sentence and its default as help."""
    parser.add_argument("--optimizer", help="Keras' name of the workers' optimizer (default: the model's, or sgd)")
    parser.add_argument("--optimizer-set", **PAIRS, help="arguments of the optimizer")
    for name, option in _options().items():
        text, default = option.text.partition(". ")[0].rstrip("."), option.default
        described = re.search(r"Default: (.*?)\.(?: |$)", option.text)
        if default is not None and default is not False:
            text += f" (default: {'on' if default is True else default})"
        elif described:
            text += f" (default: {described[1]})"
        kind = _KINDS.get(name) or _KINDS[option.annotation.removesuffix(" | None")]
        for keyword, renamed in _FLAGS.items():
            text = re.sub(rf"\b{keyword}\b", f"--{renamed.replace('_', '-')}", text)
        flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
        parser.add_argument(flag, **kind, help=text.replace("%", "%%"))


def trainer_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Trainer` that the flags stand for; see `given_options` for what it raises."""
    return grouped(given_options(arguments))


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `Trainer` that were given, by name; raise ConfigurationError if one cannot work."""
    flags = {name: getattr(arguments, _FLAGS.get(name, name)) for name in _options()}
    given = {name: value for name, value in flags.items() if value is not None and (value != [] or name == "label_col")}
    for name in ("features_col", "label_col", "sample_weight_col"):
        if name in given:
            given[name] = columns_of(given[name], optional=name != "features_col")
    weights = given.get("sample_weight_col")
    if isinstance(weights, list) and len(weights) == 1:
        (given["sample_weight_col"],) = weights
    if given.get("class_weight") == [(BALANCED, "")]:
        given["class_weight"] = BALANCED
    elif "class_weight" in given:
        weights = values_of(given["class_weight"])
        try:
            given["class_weight"] = {int(name): float(weight) for name, weight in weights.items()}
        except (TypeError, ValueError):
            raise ConfigurationError(f"`--class-weight` must be CLASS=WEIGHT. Received: {weights}") from None
    options = values_of(arguments.optimizer_set)
    if arguments.optimizer is not None:
        given["worker_optimizer"] = _optimizer(arguments.optimizer, options)
    elif options:
        raise ConfigurationError(f"`--optimizer-set` needs `--optimizer`. Received: {options} for none")
    return given


def _optimizer(name: str, options: Mapping[str, Any]) -> Any:
    try:
        return optimizer_of({"class_name": name, "config": dict(options)})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`--optimizer` and `--optimizer-set` must be what Keras knows, or `distkeras.optimizers`. "
            f"Received: {name} with {options}; "
            f"Keras said: {error}"
        ) from error


def _options() -> dict[str, Option]:
    return {name: option for name, option in options_of(Trainer).items() if name not in LEFT_OUT}
