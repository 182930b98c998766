"""``python -m distkeras.ps``: the parameter server on its own, and the table of rules."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import secrets
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.ps import rules
from distkeras.ps.center.center import Center
from distkeras.ps.center.schedulers import BoundedStaleness
from distkeras.ps.checkpoint.checkpointer import Checkpoint, Checkpointer, StartMode
from distkeras.ps.errors import ConfigurationError, DistkerasError
from distkeras.ps.events import Lines
from distkeras.ps.protocol.handshake import KEY_BYTES
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.tls import Certificate, make_certificate, server_context


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(prog="python -m distkeras.ps", description=__doc__)
    commands = main.add_subparsers(dest="command", required=True)
    commands.add_parser("rules", help="print the table of rules, in Markdown")
    commands.add_parser("key", help="print a new random key, to be kept in a file")
    commands.add_parser("certificate", help="print a new private key and certificate, to be kept in a file")
    commands.add_parser("driven", help="serve as a driver's child: settings on standard input, until it closes")
    serve = commands.add_parser("serve", help="serve one job until interrupted")
    serve.add_argument("--rule", required=True, help=f"one of {', '.join(rules.all_rules())}")
    serve.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a hyper-parameter of the rule")
    serve.add_argument("--workers", type=int, required=True, help="number of workers of the job")
    serve.add_argument("--learning-rate", type=float, help="the server's learning rate (gradient rules)")
    serve.add_argument("--staleness-bound", type=int, help="iterations that a worker may be ahead of the slowest")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    serve.add_argument("--port", type=int, default=0, help="port to bind (default: one that is free)")
    serve.add_argument("--key-file", required=True, help=f"file with the job's key, {2 * KEY_BYTES} hexadecimal digits")
    serve.add_argument("--tls", metavar="FILE", help="encrypt, with the certificate and private key of this PEM file")
    serve.add_argument("--checkpoint", metavar="URI", help="directory for snapshots; goes on from the latest one there")
    serve.add_argument("--checkpoint-every", type=int, default=100, metavar="N", help="commits (default: %(default)s)")
    serve.add_argument("--max-skipped", type=int, default=0, metavar="N", help="bad commits to skip (default: none)")
    serve.add_argument("--lifetime", type=float, metavar="SECONDS", help="end after that (default: when interrupted)")
    serve.add_argument("--measure-gap", action="store_true", help="record the gap of each commit")
    return main


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Command line → what `build` takes."""
    pairs = []
    for assignment in arguments.set:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigurationError(f"`--set` must be NAME=VALUE. Received: --set {assignment}")
        pairs.append((name, text))
    return {
        "rule": arguments.rule,
        "hyper_parameters": rules.from_text(arguments.rule, pairs),
        "workers": arguments.workers,
        "learning_rate": arguments.learning_rate,
        "staleness_bound": arguments.staleness_bound,
        "measure_gap": arguments.measure_gap,
        "max_skipped": arguments.max_skipped,
        "host": arguments.host,
        "port": arguments.port,
        "key": Path(arguments.key_file).read_text().strip(),
        "tls": arguments.tls and {"certificate": Path(arguments.tls).read_text(), "private_key": ""},
        "deadlines": {},
        "checkpoint": arguments.checkpoint and {"uri": arguments.checkpoint, "every": arguments.checkpoint_every},
    }


def build(settings: dict[str, Any]) -> tuple[ParameterServer, bool]:
    """A server from JSON-ready settings: see `settings_of` and `process.ServerProcess`.

    Returns:
        The server; and whether every partition goes on exactly where a snapshot has it (True without one).

    Raises:
        ConfigurationError: a setting that cannot work.
        SnapshotError: the snapshots cannot be read, or are another job's.
        OSError: the port cannot be bound.
    """
    rule = rules.make(settings["rule"], **settings["hyper_parameters"])
    workers, bound = settings["workers"], settings["staleness_bound"]
    try:
        key = bytes.fromhex(settings["key"])
    except ValueError:
        raise ConfigurationError("the key must be hexadecimal digits. Received: something else") from None
    saver, saved, life, incarnation = None, None, StartMode(**settings.get("life", {})), 1

    def center(vector: np.ndarray, moving_statistics: np.ndarray) -> Center:
        return Center(
            rule,
            vector,
            workers=workers,
            learning_rate=settings["learning_rate"],
            scheduler=None if bound is None else BoundedStaleness(workers, bound),
            moving_statistics=moving_statistics,
            measure_gap=settings["measure_gap"],
            incarnation=incarnation,
        )

    center(np.zeros(1, np.float32), np.zeros(0, np.float32))  # a bad combination fails here, not at the first publish
    restored, exact = None, True
    if settings["checkpoint"]:
        saver = Checkpointer(Checkpoint(**settings["checkpoint"]), settings.get("job"))
        saved = saver.load(life)
        incarnation = 1 + max(saver.lives(), life.after)
        if saved is not None:
            restored = center(saved.state.arrays["center"], saved.state.arrays["moving_statistics"])
            exact = saver.resume(restored, saved, life)
    server = ParameterServer(
        center,
        key=key,
        host=settings["host"],
        port=settings["port"],
        deadlines=Deadlines(**settings["deadlines"]),
        context=server_context(Certificate(**settings["tls"])) if settings["tls"] else None,
        max_skipped=settings["max_skipped"],
        saver=saver,
        restored=restored,
    )
    return server, exact


def _facts(server: ParameterServer, exact: bool) -> dict[str, Any]:
    """What a driver is told on standard output: the address, and where a restored center stands."""
    facts: dict[str, Any] = {"host": server.address[0], "port": server.address[1], "clock": None}
    if server.center is not None:
        facts |= {"clock": server.center.clock, "incarnation": server.center.incarnation, "exact": exact}
        facts["epoch"] = 0 if exact else server.center.members[0].epoch
    return facts


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    arguments = parser().parse_args(argv)
    driven = arguments.command == "driven"
    handler = logging.StreamHandler()
    handler.setFormatter(Lines() if driven else logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    # A driver has levels of its own.
    logging.basicConfig(level=logging.INFO if driven else logging.WARNING, handlers=[handler])
    if arguments.command == "rules":
        sys.stdout.write(rules.table() + "\n")
        return 0
    if arguments.command == "key":
        sys.stdout.write(secrets.token_hex(KEY_BYTES) + "\n")
        return 0
    if arguments.command == "certificate":
        made = make_certificate()
        sys.stdout.write(made.private_key + made.certificate)
        return 0
    try:
        server, exact = build(json.loads(sys.stdin.readline()) if driven else settings_of(arguments))
    except (DistkerasError, OSError) as error:
        busy = getattr(error, "errno", None) == errno.EADDRINUSE
        sys.stdout.write(json.dumps({"error": str(error), "busy": busy}) + "\n")
        return 2
    with server:
        sys.stdout.write(json.dumps(_facts(server, exact)) + "\n")
        sys.stdout.flush()
        if driven:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle; it still needs the center
            sys.stdin.read()  # returns when the driver closes its end, or dies
        else:
            done = threading.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: done.set())
            if not done.wait(arguments.lifetime):
                logging.warning("the server's %g seconds are over", arguments.lifetime)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
