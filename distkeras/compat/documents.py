"""What `help` says of dist-keras' trainers: their own words, then every argument that they take."""

from __future__ import annotations

import inspect
import re

import distkeras.trainer
from distkeras.ps.rules import Rule

#: What an entry of ``Args:`` begins with: one name, or several.
_ENTRY = re.compile(r"^    (?=\w[\w, ]*: )", re.MULTILINE)
_SECTION = re.compile(r"^Args:\n((?:    .*\n?|\n)+)", re.MULTILINE)

_DEFAULTS = "Where the signature has a default, that is the one."
_OWN = "keras_model: a built `keras.Model`. It is not changed.\n"
_PORT = "master_port: `port`.\n"


def documented(words: str, rule: type[Rule]) -> str:
    """A docstring for a trainer under ``rule`` that says ``words`` of itself."""
    own = [entry for entry in _arguments(rule) if not entry.startswith("window:")]
    options = [entry for entry in _arguments(distkeras.trainer.Trainer) if not entry.startswith(("model:", "rule:"))]
    taken = {entry.partition(":")[0] for entry in own}
    rest = [entry for entry in options if entry.partition(":")[0] not in taken]
    entries = "".join(f"    {entry.rstrip()}\n" for entry in (_OWN, *own, *rest, _PORT))
    head = f"{inspect.cleandoc(words)}\n\n{_DEFAULTS}"
    return f"{head}\n\nArgs:\n{entries}\nRaises:\n    ConfigurationError: an argument cannot work.\n"


def _arguments(kind: type) -> list[str]:
    """The entries of a class' ``Args:``, each as it stands but for its first indentation."""
    section = _SECTION.search(inspect.cleandoc(kind.__doc__ or "") + "\n")
    return _ENTRY.split(section[1])[1:] if section else []
