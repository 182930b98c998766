"""Trains, scores and serves: one command for all that the package does without a program of yours."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from distkeras import __version__, chatter
from distkeras.flags import SuggestingParser
from distkeras.job_server.errors import JobFailedError
from distkeras.ps.errors import ConfigurationError, DistkerasError, headline

#: Commands with a parser of their own, which is imported where it is needed: the module, and the words before the rest.
_PROGRAMS = {
    "train": ("distkeras.commands.train", ()),
    "score": ("distkeras.commands.score", ()),
    "rules": ("distkeras.ps.__main__", ("rules",)),
    "server": ("distkeras.ps.__main__", ("serve",)),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    from distkeras.commands.jobs import add_actions

    main = SuggestingParser(prog="distkeras", description=__doc__, allow_abbrev=False)
    main.add_argument("--version", action="version", version=f"distkeras {__version__}", help="show the version")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a Keras model under any update rule", add_help=False)
    commands.add_parser("score", help="predict with a Keras model, as a batch or as a stream", add_help=False)
    commands.add_parser("rules", help="print the table of update rules", add_help=False)
    commands.add_parser("server", help="run a parameter server on its own", add_help=False)
    _add_serve_flags(commands.add_parser("serve", help="run the job server; needs distkeras[jobs]", allow_abbrev=False))
    add_actions(commands.add_parser("jobs", help="send jobs to a job server, and watch them"))
    completion = commands.add_parser("completion", help="print a completion script for a shell")
    completion.add_argument("shell", choices=["bash", "zsh"])
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0; 1 for a job that failed; 2 for a typed error; 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in _PROGRAMS:
        module, first = _PROGRAMS[words[0]]
        return int(importlib.import_module(module).main([*first, *words[1:]]))
    arguments = parser().parse_args(words)
    try:
        if arguments.command == "serve":
            return _serve(arguments)
        if arguments.command == "completion":
            return _completion(arguments.shell)
        from distkeras.commands.jobs import run

        run(arguments)
    except JobFailedError as error:
        sys.stderr.write(f"distkeras: {headline(str(error))}\n")
        return 1
    except (DistkerasError, OSError) as error:
        sys.stderr.write(f"distkeras: {type(error).__name__}: {headline(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    try:
        from distkeras.job_server.serve import add_flags
    except ImportError:
        return  # `_serve` raises an error that says what to install
    add_flags(parser)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from distkeras.job_server.serve import serve
    except ImportError as error:
        raise ConfigurationError(
            f"`serve` needs the extra jobs: pip install 'distkeras[jobs]'. Received: {error}"
        ) from error
    chatter.end()  # jobs' drivers are programs of their own
    return serve(arguments)


def _completion(shell: str) -> int:
    try:
        import shtab
    except ImportError as error:
        raise ConfigurationError(
            f"`completion` needs the extra completion: pip install 'distkeras[completion]'. Received: {error}"
        ) from error
    main = parser()
    pending = [main]
    for part in pending:
        for action in part._actions:  # noqa: SLF001 - argparse lists them nowhere else
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab looks for
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - the same
                pending += action.choices.values()
    sys.stdout.write(shtab.complete(main, shell=shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
