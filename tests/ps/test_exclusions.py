"""Tests of the table of what excludes what."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.validate import EXCLUSIONS, Exclusion, reason_against, refuse
from distkeras.settings import TrainSettings

CASES = [(capability, exclusion) for capability, listed in EXCLUSIONS.items() for exclusion in listed]
SETTINGS = [ServerSettings(make("agn"), 2), WorkerSettings(make("agn"), 2), TrainSettings()]


@pytest.mark.parametrize(("capability", "exclusion"), CASES, ids=lambda part: getattr(part, "option", part))
def test_the_error_names_the_option_its_value_and_the_reason(capability: str, exclusion: Exclusion) -> None:
    option, allowed, why = exclusion
    other: Any = "other" if isinstance(allowed[0], str) else 7
    with pytest.raises(ConfigurationError) as caught:
        refuse(capability, **{option: other})
    expected, received = f"`{option}` must be {allowed[0]!r}", f"{option}={other!r}"
    if option == "stream":
        expected, received = "`df` must not be a stream", "a stream"
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith(f"{why}. Received: {received}")
    for value in allowed:
        assert reason_against(capability, **{option: value}) is None


@pytest.mark.parametrize("capability", EXCLUSIONS)
def test_options_are_fields_of_the_settings_whose_defaults_exclude_nothing(capability: str) -> None:
    fields = {field.name for one in SETTINGS for field in dataclasses.fields(one)}  # type: ignore[arg-type]  # dataclasses
    assert {exclusion.option for exclusion in EXCLUSIONS[capability]} <= fields | {"stream"}
    assert reason_against(capability, *SETTINGS, stream=False) is None


def test_settings_of_a_server_and_of_workers_refuse_what_relays_and_tables_exclude() -> None:
    with pytest.raises(ConfigurationError, match="`measure_gap` must be False with tables by rows"):
        ServerSettings(make("downpour"), 2, tables=(TableShape("users", 3, 2, 2),), measure_gap=True)
    with pytest.raises(ConfigurationError, match="`staleness_bound` must be None with relays"):
        ServerSettings(make("downpour"), 2, relays=1, staleness_bound=3)
    with pytest.raises(ConfigurationError, match="`overlap` must be False with relays"):
        WorkerSettings(make("downpour"), 2, relays=1, overlap=True)
