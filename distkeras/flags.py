"""The options of `Trainer` as flags; and any options as a TOML file."""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from distkeras import __version__
from distkeras.data.padding import padding_from_json
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


class SuggestingParser(argparse.ArgumentParser):
    """A parser whose errors suggest the option or the command that is spelled like the given one."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, the usage and ``message``, with what may have been meant."""
        super().error(self.with_suggestion(message))

    def with_suggestion(self, message: str) -> str:
        """Return argparse's ``message`` with what may have been meant."""
        unknown = re.match(r"unrecognized arguments: (.*)", message)
        chosen = re.match(r"(argument [^:]+: invalid choice: '([^']*)') \(choose from (.*)\)", message)
        if unknown is not None:
            words = [word.partition("=")[0] for word in unknown[1].split()]
            return message + _meant(words, self._flags())
        if chosen is not None and (meant := _meant([chosen[2]], re.findall(r"[\w-]+", chosen[3]))):
            return chosen[1] + meant
        return message

    def _flags(self) -> list[str]:
        """Return the options, also of the commands below."""
        flags: list[str] = []
        pending: list[argparse.ArgumentParser] = [self]
        for parser in pending:
            for action in parser._actions:  # noqa: SLF001 - argparse lists them nowhere else
                flags += action.option_strings
                if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - the same
                    pending += action.choices.values()
        return flags


def _meant(words: Sequence[str], known: Sequence[str]) -> str:
    near = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
    return f" (did you mean {' '.join(near)}?)" if near else ""


def _shortened(action: argparse.Action) -> argparse.Action:
    """Return an option with one line of help, and with one of several values."""
    short = copy.copy(action)
    text = re.split(r";(?![^(]*\))", action.help or "")[0]
    default = re.search(r" \(default: .*\)$", action.help or "")
    short.help = text + (default[0] if default and default[0] not in text else "")
    short.metavar = action.metavar or (action.dest.upper() if action.choices else None)
    short.nargs = None if action.nargs in ("+", "*") else action.nargs
    short.option_strings = action.option_strings[:1]
    return short


class _ShortHelp(argparse.Action):
    """Prints the first options alone."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        assert isinstance(parser, TomlArgumentParser), "no other parser has this action"
        sys.stdout.write(parser.format_short_help())
        parser.exit()


class TomlArgumentParser(SuggestingParser):
    """A parser with ``--config``: a TOML file whose keys are flags' names with underscores; flags win over it.

    The file's values pass through the parser too, so that they are checked like flags.

    Args:
        first: keys of the options that ``--help`` shows; ``--help-all`` shows every one.
        example: ends the short help.
        options: of `argparse.ArgumentParser`.
    """

    def __init__(self, *, first: Sequence[str] = (), example: str = "", **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self._first, self._example = first, example
        self.add_argument("-h", "--help", action=_ShortHelp, nargs=0, help="show the most important options")
        self.add_argument("--help-all", action="help", help="show every option, and the rest of this help")
        self.add_argument("--version", action="version", version=f"distkeras {__version__}", help="show the version")
        self.add_argument("--config", metavar="FILE", help="TOML file with the options below as keys")

    def format_short_help(self) -> str:
        """Return one screen of help."""
        keys = {_key(action): action for action in self._actions}
        formatter = argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=26, width=100)
        needed = [action for action in keys.values() if action.required]
        formatter.add_usage(None, needed, [])
        formatter.add_text((self.description or "").partition("\n")[0])
        formatter.start_section("most important options")
        formatter.add_arguments([_shortened(keys[name]) for name in self._first])
        formatter.end_section()
        formatter.add_text(self._example)
        formatter.add_text(f"{self.prog} --help-all shows all {len(self.options())} options.")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line: the usage of all options would hide it."""
        self.exit(2, f"{self.prog}: error: {self.with_suggestion(message)}; {self.prog} --help shows the options\n")

    def parse_with_file(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options of the command line and, before it, of the file that it names."""
        flags = [word.partition("=")[0] for word in argv if word.startswith("--") and word != "--"]
        if unknown := [flag for flag in flags if flag not in self._option_string_actions]:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")  # argparse first asks for what is missing
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        config = first.parse_known_args(argv)[0].config
        return self.parse_args([*(self._arguments_of(config) if config else ()), *argv])

    def options(self) -> dict[str, argparse.Action]:
        """Return what a file may set, by its keys."""
        keys = {_key(action): action for action in self._actions}
        return {key: action for key, action in keys.items() if key not in ("help", "help_all", "version", "config")}

    def _arguments_of(self, path: str) -> Iterator[str]:
        """Yield the command line that says the same as a TOML file."""
        options = self.options()
        for key, value in _read_toml(path).items():
            option = options.get(key)
            if option is None:
                raise ConfigurationError(f"each key of {path} must be one of {', '.join(options)}. Received: {key}")
            flag = option.option_strings[0]
            if option.type is _class_weight and value == BALANCED:
                yield from [flag, BALANCED]
            elif option.type in (name_and_value, _class_weight):
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


def _key(action: argparse.Action) -> str:
    """Return the name of an option in a file: that of its first long flag."""
    return next(flag for flag in action.option_strings if flag.startswith("--"))[2:].replace("-", "_")


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"`--config` must be a TOML file. Received: --config {path}: {error}") from error


def name_and_value(text: str) -> tuple[str, str]:
    """Return the parts of NAME=VALUE; an error of argparse for another text."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE. Received: {text!r}")
    return name, value


def _class_weight(text: str) -> tuple[str, str]:
    return (BALANCED, "") if text == BALANCED else name_and_value(text)


def columns_of(texts: Sequence[str], *, optional: bool = False) -> Any:
    """Return a mapping where each text is NAME=COLUMN and there are several; else the columns as they are.

    ``optional``: NAME= is for an output without a column, whose entry is None.
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
PAIRS: dict[str, Any] = {
    "nargs": "+",
    "action": "extend",
    "type": name_and_value,
    "default": [],
    "metavar": "NAME=VALUE",
}

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
    "Mapping[int, float] | str": PAIRS | {"type": _class_weight, "metavar": "CLASS=VALUE"},
    "Padding | Mapping[str, Padding]": PAIRS,
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
    if "padding" in given:
        given["padding"] = padding_from_json(values_of(given["padding"]))
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
