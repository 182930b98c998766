"""``python -m distkeras.ps``: the parameter server on its own, and the table of rules."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import math
import re
import secrets
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from distkeras.ps import rules
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError, ServerLostError
from distkeras.ps.events import JsonFormatter
from distkeras.ps.protocol.framing import KEY_BYTES
from distkeras.ps.server.process import DriverLink, StartRequest, key_from_text, serve
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.server.start_report import StartReport, report_to_json
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.processes import accompany, build
from distkeras.ps.shards.shard_server import ShardDispatcher
from distkeras.ps.transport.client import Certificate, make_certificate
from distkeras.ps.world.processes import POLL_SECONDS

#: Settings that have special flags, or none.
_OWN_FLAGS = ("rule", "deadlines", "checkpoint", "tables")
#: Seconds that a server may take to end, with a last snapshot, after its driver has ended.
_END_SECONDS = 120


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    main = argparse.ArgumentParser(prog="python -m distkeras.ps", description=__doc__)
    commands = main.add_subparsers(dest="command", required=True)
    commands.add_parser("rules", help="print the table of rules, in Markdown")
    commands.add_parser("key", help="print a new random key, to be kept in a file")
    commands.add_parser("certificate", help="print a new private key and certificate, to be kept in a file")
    child = commands.add_parser(
        "child", help="serve as a driver's child: read a request from standard input, and serve until the goodbye"
    )
    child.add_argument(
        "--driver", type=int, metavar="FD", help="a descriptor of the driver's process; serve while it lives"
    )
    alone = commands.add_parser("serve", help="serve one job until interrupted")
    alone.add_argument("--rule", required=True, help=f"one of {', '.join(rules.all_rules())}")
    alone.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a hyper-parameter of the rule")
    _add_settings(alone)
    alone.add_argument("--key-file", required=True, help=f"file with the job's key, {2 * KEY_BYTES} hexadecimal digits")
    alone.add_argument("--tls", metavar="FILE", help="encrypt, with the certificate and private key of this PEM file")
    alone.add_argument("--checkpoint", metavar="URI", help="folder of snapshots; continues from the latest")
    alone.add_argument("--checkpoint-every", type=int, default=100, metavar="N", help="interval (default: %(default)s)")
    alone.add_argument(
        "--lifetime", type=float, metavar="SECONDS", help="end after this time (default: when interrupted)"
    )
    return main


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Add a flag for each plain field of `ServerSettings`, with the docstring's text as help."""
    # `getdoc` gives the same indentation in every version of Python. Under -OO there is no docstring.
    texts = dict(re.findall(r"^ {4}(\w+): (.+)$", inspect.getdoc(ServerSettings) or "", re.M))
    hints = typing.get_type_hints(ServerSettings)
    for option in dataclasses.fields(ServerSettings):
        if option.name in _OWN_FLAGS:
            continue
        flag, text = f"--{option.name.replace('_', '-')}", texts.get(option.name, "").rstrip(".").replace("%", "%%")
        kinds = typing.get_args(hints[option.name]) or (hints[option.name],)
        if bool in kinds:
            command.add_argument(flag, action="store_true", help=text)
            continue
        required = option.default is dataclasses.MISSING
        default = None if required else option.default
        text += "" if default is None else " (default: %(default)s)"
        kind: Callable[[str], Any] = next(kind for kind in (int, float, str) if kind in kinds)
        if {int, str} <= {*kinds}:
            kind = _number_or_text
        command.add_argument(flag, type=kind, required=required, default=default, help=text)


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def request_from(arguments: argparse.Namespace) -> StartRequest:
    """Return the request that the flags of ``serve`` describe; raise a ConfigurationError if one is invalid."""
    pairs = []
    for assignment in arguments.set:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigurationError(f"`--set` must be NAME=VALUE. Received: --set {assignment}")
        pairs.append((name, text))
    names = [option.name for option in dataclasses.fields(ServerSettings) if option.name not in _OWN_FLAGS]
    settings = ServerSettings(
        rule=rules.make(arguments.rule, **rules.from_text(arguments.rule, pairs)),
        checkpoint=arguments.checkpoint and Checkpoint(arguments.checkpoint, arguments.checkpoint_every),
        **{name: getattr(arguments, name) for name in names},
    )
    key = key_from_text(Path(arguments.key_file).read_text())
    return StartRequest(settings, key, arguments.tls and Certificate(Path(arguments.tls).read_text(), ""))


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    arguments = parser().parse_args(argv)
    if arguments.command == "rules":
        sys.stdout.write(rules.table() + "\n")
    elif arguments.command == "key":
        sys.stdout.write(secrets.token_hex(KEY_BYTES) + "\n")
    elif arguments.command == "certificate":
        certificate = make_certificate()
        sys.stdout.write(certificate.private_key + certificate.certificate)
    else:
        return _serve(arguments)
    return 0


def _checked(request: StartRequest) -> StartRequest:
    request.settings.check_store()
    return request


def _serve(arguments: argparse.Namespace) -> int:
    link = DriverLink(sys.stdin.fileno(), arguments.driver) if arguments.command == "child" else None
    _log_to_standard_error(link is not None)
    if link is None:
        return serve(
            lambda: _checked(request_from(arguments)),
            _send_report,
            lambda server: _until_interrupted(arguments.lifetime, server),
            build=build,
            accompany=accompany,
        )
    return serve(
        lambda: _request_of(link),
        _send_report,
        lambda server: _until_over(link, server),
        require_driver=link.require_driver,
        build=build,
        accompany=accompany,
    )


def _send_report(report: StartReport) -> None:
    sys.stdout.write(report_to_json(report) + "\n")
    sys.stdout.flush()


def _request_of(link: DriverLink) -> StartRequest:
    line = link.line()
    if line is None:
        raise ServerLostError("the driver ended before it had sent the request to start a server")
    return StartRequest.from_json(line)


def _until_over(link: DriverLink, server: ParameterServer) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C, and still needs the center
    # A shard ends with its sequencer, whose last snapshot needs it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if isinstance(server.dispatcher, ShardDispatcher) else _end)
    link.wait_until_over(lambda: server.corrupt)
    signal.alarm(_END_SECONDS)  # its default action ends the process even if a thread hangs
    return int(server.corrupt)


def _end(number: int, frame: FrameType | None) -> None:
    """End the process, after a last snapshot: the machine may be shut down."""
    signal.signal(number, signal.SIG_IGN)
    signal.alarm(_END_SECONDS)
    sys.exit(128 + number)


def _until_interrupted(lifetime: float | None, server: ParameterServer) -> int:
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    deadline = math.inf if lifetime is None else time.monotonic() + lifetime
    while not done.wait(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
        if server.corrupt:
            return 1  # the reason is in the log
        if time.monotonic() >= deadline:
            logging.warning("the server ends: it has run for %g seconds", lifetime)
            return 1
    return 0


def _log_to_standard_error(child: bool) -> None:
    handler = logging.StreamHandler()
    plain = "%(asctime)s %(name)s %(levelname)s %(message)s"
    handler.setFormatter(JsonFormatter() if child else logging.Formatter(plain))
    # A driver filters the records by its own levels.
    logging.basicConfig(level=logging.INFO if child else logging.WARNING, handlers=[handler])


if __name__ == "__main__":
    sys.exit(main())
