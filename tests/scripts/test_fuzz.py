"""Tests of the fuzzer with a small number of inputs, and of planted faults that it must find."""

from __future__ import annotations

import faulthandler
from typing import Any

import numpy as np
import pytest
from fuzz import command, parser, server
from fuzz.inputs import Inputs
from fuzz.parser import Violation

from distkeras.ps.protocol import framing
from distkeras.ps.protocol.framing import Connection, Reader
from distkeras.ps.protocol.messages import Ack


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, second = ([inputs.any() for _ in range(50)] for inputs in (Inputs(3), Inputs(3)))
    assert first == second
    assert len(set(first)) > 40


def test_the_parser_survives_some_thousand_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--inputs", "5000", "--seed", "11"]) == 0
    output = capsys.readouterr().out
    for outcome in ("refused", "cut off", "message", "not authenticated", "waits after the genuine handshake"):
        assert f" {outcome}\n" in output


@pytest.mark.slow
def test_a_server_survives_some_hundred_inputs() -> None:
    outcomes = server.live(600, 12)
    assert outcomes["stranger: refused"] + outcomes["stranger: hung up at once"] == 300
    assert min(outcomes[name] for name in ("peer: refused", "peer: answered", "honest: commits")) > 0
    assert outcomes["server: threads more"] <= 0


class TestPlantedFaults:
    """Each kind of fault that the fuzzer searches for is planted and must be found."""

    def found_by_seed(self) -> pytest.RaisesExc[Violation]:
        return pytest.raises(Violation, match="of seed 0 to a")

    def test_an_unexpected_error_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # No message of the handshake reaches this function.
        monkeypatch.setattr(framing, "_check_rows", lambda *_: [][1])
        with self.found_by_seed():
            parser.parse(3000, 0)

    def test_the_watch_for_hangs_ends_with_the_fuzzer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A watch that remains would end this process a minute later."""
        calls: list[str] = []

        def record_calls_of(name: str) -> None:
            call = getattr(faulthandler, name)

            def recorded(*args: Any, **options: Any) -> None:
                calls.append(name)
                call(*args, **options)

            monkeypatch.setattr(faulthandler, name, recorded)

        record_calls_of("dump_traceback_later")
        record_calls_of("cancel_dump_traceback_later")
        # No message of the handshake reaches this function.
        monkeypatch.setattr(framing, "_check_rows", lambda *_: [][1])
        with self.found_by_seed():
            parser.parse(3000, 0)
        assert calls == ["dump_traceback_later", "cancel_dump_traceback_later"]

    def test_memory_beyond_the_limits_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parser, "LIMITS", framing.Limits(fields=4096, body=0))
        limits = framing.Limits(fields=4096, body=1 << 16)
        init = Reader.__init__
        monkeypatch.setattr(Reader, "__init__", lambda self, _, *args, **options: init(self, limits, *args, **options))
        with self.found_by_seed():
            parser.parse(3000, 0)

    def test_an_admitted_stranger_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Connection, "_check_proof", lambda self, received, expected: None)
        with self.found_by_seed():
            parser.parse(3000, 0)

    def test_an_accepted_message_of_a_stranger_is_found(self) -> None:
        target = parser.Target("stranger's server")
        with pytest.raises(Violation, match="Ack from a stranger"):
            target.check(Ack(1, 2, 3, 4))

    def test_harm_to_an_honest_worker_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "undisturbed", lambda steps, size: (np.ones(size, np.float32), 0))
        with pytest.raises(Violation, match="not the undisturbed one"):
            server.live(30, 0)
