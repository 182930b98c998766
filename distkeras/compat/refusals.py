"""What a name of dist-keras raises that has no equivalent here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from distkeras.ps.errors import ConfigurationError

#: Where a rule comes in place of dist-keras' worker and server classes.
RULES = "an algorithm is one `Rule`, both halves: `distkeras.Trainer(model, rule)`, `python -m distkeras.ps rules`"
#: What comes in place of a trainer that travels.
SUBMIT = "there is `distkeras.jobs.Client`, and `scripts/train.py` with a file of its arguments for spark-submit"


def refusal(name: str, instead: str) -> ConfigurationError:
    """The error for ``name``."""
    return ConfigurationError(f"`{name}` is dist-keras' and has no equivalent here; {instead}. Received: a use of it")


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A function or method ``name`` that raises its refusal whatever it is given."""

    def raise_it(*_arguments: Any, **_keywords: Any) -> NoReturn:
        raise refusal(name, instead)

    raise_it.__name__ = raise_it.__qualname__ = name
    raise_it.__doc__ = f"Of dist-keras, without an equivalent: {instead}."
    return raise_it


class RefusedClass:
    """A class that raises its refusal where it is instantiated."""

    instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str) -> None:
        cls.instead = instead

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        raise refusal(type(self).__name__, self.instead)
