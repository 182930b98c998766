"""The options that a capability of a job excludes, and why: each reason is in this table, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from distkeras.ps.errors import ConfigurationError


class Exclusion(NamedTuple):
    """An option that a capability excludes, unless it has one of the values ``allowed``."""

    option: str
    allowed: tuple[Any, ...]
    why: str


_UNENCRYPTED = "connections between workers are authenticated, and not encrypted"

#: By capability. Options are fields of the settings of server, workers and training; "stream" is whether there is one.
EXCLUSIONS = {
    "relays": (
        Exclusion("staleness_bound", (None,), "a group advances together"),
        Exclusion("overlap", (False,), "the workers of a group wait for its slowest one"),
        Exclusion("wire_format", ("float32",), "a sum is of what workers sent"),
        Exclusion("tls", (False,), _UNENCRYPTED),
        Exclusion("stream", (False,), "the workers of a micro-batch begin one by one"),
    ),
    "a rule whose workers exchange": (
        Exclusion("server", ("driver",), "a server that moves is not supported"),
        Exclusion("max_skipped", (0,), "what one worker skips is in the parameters of all"),
        Exclusion("tls", (False,), _UNENCRYPTED),
        Exclusion("stream", (False,), "the steps of an epoch must be known before the first one"),
    ),
    "tables by rows": (
        Exclusion("wire_format", ("float32",), "rows travel as float32"),
        Exclusion("overlap", (False,), "the next window's rows come with the reply for which it does not wait"),
        Exclusion("measure_gap", (False,), "a gap is of whole vectors"),
        Exclusion("relays", (None,), "relays add up whole vectors"),
        Exclusion("frozen_weights", (None,), "the model is sent without these weights"),
    ),
    "a stream": (
        Exclusion("partitioned_already", (False,), "its micro-batches are spread over the workers"),
        Exclusion("server", ("driver",), "the driver receives its micro-batches"),
        Exclusion("tables", ("auto", "dense"), "its tables are dense"),
    ),
}


def reason_against(capability: str, *settings: object, **options: Any) -> str | None:
    """Return the first reason why a job with these options cannot have ``capability``; None if it can.

    Args:
        capability: a key of `EXCLUSIONS`.
        settings: objects whose attributes are options.
        options: further ones. What is neither here nor there is not looked at.
    """
    given: Mapping[str, Any] = {name: value for one in settings for name, value in vars(one).items()} | options
    for option, allowed, why in EXCLUSIONS[capability]:
        if option in given and given[option] not in allowed:
            if option == "stream":
                return f"`df` must not be a stream with {capability}: {why}. Received: a stream"
            values = " or ".join(map(repr, allowed))
            return f"`{option}` must be {values} with {capability}: {why}. Received: {option}={given[option]!r}"
    return None


def refuse(capability: str, *settings: object, **options: Any) -> None:
    """Raise ConfigurationError if a job with these options cannot have ``capability``; see `reason_against`."""
    reason = reason_against(capability, *settings, **options)
    if reason is not None:
        raise ConfigurationError(reason)
