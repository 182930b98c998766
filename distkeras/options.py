"""The declaration of each option, as `Trainer` and its groups have it: name, type, default and text.

Command line, estimator, job server and docs read it here, so that an option is declared in one place.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from distkeras.settings import GROUPS


@dataclass(frozen=True)
class Option:
    """One argument of a constructor, or one field of a group of options.

    Args:
        name: of the argument or field.
        annotation: its type, as it is written in Python.
        default: its default, `inspect.Parameter.empty` for none.
        text: what the docstring says of it, on one line and without markup.
    """

    name: str
    annotation: str
    default: Any
    text: str


def options_of(kind: type) -> dict[str, Option]:
    """Return the arguments of the constructor of ``kind`` by name, with the fields of a group in its place."""
    texts = texts_of_arguments(kind)
    options: dict[str, Option] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in GROUPS:
            options |= options_of(GROUPS[name])
        else:
            options[name] = Option(name, str(parameter.annotation), parameter.default, texts.get(name, ""))
    return options


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the default of each option of ``kind`` that has one."""
    options = options_of(kind).values()
    return {option.name: option.default for option in options if option.default is not inspect.Parameter.empty}


def texts_of_arguments(kind: type) -> dict[str, str]:
    """Return what the section "Args" of a docstring says of each argument, on one line and without markup."""
    section = (inspect.getdoc(kind) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.M):
        texts |= dict.fromkeys(names.split(", "), " ".join(text.replace("`", "").split()))
    return texts
