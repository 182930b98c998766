"""The fuzzer on a small number of inputs, and that it finds what it looks for."""

from __future__ import annotations

import faulthandler
from typing import Any

import numpy as np
import pytest
from fuzz import command, parser, server
from fuzz.inputs import Inputs
from fuzz.limits import Violation

from distkeras.ps.protocol import framing
from distkeras.ps.protocol.framing import Connection, Reader
from distkeras.ps.protocol.messages import Ack


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, second = ([inputs.any() for _ in range(50)] for inputs in (Inputs(3), Inputs(3)))
    assert first == second
    assert len(set(first)) > 40


def test_the_parser_stands_some_thousand_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--inputs", "5000", "--seed", "11"]) == 0
    told = capsys.readouterr().out
    for outcome in ("refused", "cut off", "message", "not authenticated", "waits after the genuine handshake"):
        assert f" {outcome}\n" in told


def test_a_server_stands_some_hundred_inputs() -> None:
    outcomes = server.live(600, 12)
    assert outcomes["stranger: refused"] + outcomes["stranger: hung up at once"] == 300
    assert min(outcomes[name] for name in ("peer: refused", "peer: answered", "honest: commits")) > 0
    assert outcomes["server: threads more"] <= 0


class TestFinding:
    """Each fault that is looked for, put in by hand."""

    def finds(self) -> pytest.RaisesExc[Violation]:
        return pytest.raises(Violation, match="of seed 0 to a")

    def test_another_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(framing, "_check_rows", lambda *_: [][1])  # no message of the handshake comes there
        with self.finds():
            parser.parse(3000, 0)

    def test_its_watch_for_hangs_ends_with_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Left behind, it would end this process a minute later."""
        calls: list[str] = []

        def note(name: str) -> None:
            call = getattr(faulthandler, name)

            def noted(*args: Any, **options: Any) -> None:
                calls.append(name)
                call(*args, **options)

            monkeypatch.setattr(faulthandler, name, noted)

        note("dump_traceback_later")
        note("cancel_dump_traceback_later")
        monkeypatch.setattr(framing, "_check_rows", lambda *_: [][1])  # no message of the handshake comes there
        with self.finds():
            parser.parse(3000, 0)
        assert calls == ["dump_traceback_later", "cancel_dump_traceback_later"]

    def test_memory_beyond_the_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parser, "LIMITS", framing.Limits(fields=4096, body=0))
        limits = framing.Limits(fields=4096, body=1 << 16)
        init = Reader.__init__
        monkeypatch.setattr(Reader, "__init__", lambda self, _, *args, **options: init(self, limits, *args, **options))
        with self.finds():
            parser.parse(3000, 0)

    def test_a_stranger_that_is_let_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Connection, "_check_proof", lambda self, received, expected: None)
        with self.finds():
            parser.parse(3000, 0)

    def test_a_message_of_a_stranger(
        self,
    ) -> None:
        target = parser.Target("stranger's server")
        with pytest.raises(Violation, match="Ack from a stranger"):
            target.check(Ack(1, 2, 3, 4))

    def test_an_honest_worker_that_is_harmed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "undisturbed", lambda steps, size: (np.ones(size, np.float32), 0))
        with pytest.raises(Violation, match="not the undisturbed one"):
            server.live(30, 0)
