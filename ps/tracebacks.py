"""Tracebacks as text: which of their lines are the user's own, and what a library's error says."""

from __future__ import annotations

import os
import re

#: Set to "full", it has every error show all that is known of where it came from.
VARIABLE = "DISTKERAS_TRACEBACK"

#: Files of this package, of installed ones, of the standard library, and what has no file.
_LIBRARY = re.compile(
    r"[/\\](?:site-packages|dist-packages|python3?\.\d+t?|pyspark)[/\\]|\.zip[/\\]|^<frozen"
    r"|[/\\]distkeras[/\\](?:(?:analysis|cluster|compat|data|job|keras_model|ml|ps|results|transformers)[/\\]|(?:__init__|callbacks|flags|settings|spark|trainers?)\.py$)"
)
_FRAME = re.compile(r'^  File "([^"\n]+)", line \d+, in .*\n(?:^    .*\n?)*', re.M)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: First lines that say nothing: what is wrong follows, after what the second pattern matches.
_EMPTY = re.compile(r"^(?:\w+: )?(?:Graph execution error|Exception encountered when calling|An exception was thrown)")
_DETAILS = re.compile(r"^(?:Detected at node|Traceback \(most|  File |    |\s*\[\[|\t|Arguments received|Stack trace)")


def shown_in_full() -> bool:
    """Whether errors are to show everything."""
    return os.environ.get(VARIABLE, "").lower() == "full"


def is_library(path: str) -> bool:
    """Whether a file of a traceback is no code of the user's."""
    return _LIBRARY.search(path) is not None


def users_frames(text: str) -> str:
    """The frames of a formatted traceback that are the user's own code, as they stand there; empty if none is."""
    return "".join(match[0] for match in _FRAME.finditer(text) if not is_library(match[1])).rstrip("\n")


def headline(text: str) -> str:
    """The one line of an error's text, as a library words it, that says what is wrong."""
    lines = [line.rstrip() for line in _ANSI.sub("", text).splitlines() if line.strip()]
    if len(lines) < 2 or not _EMPTY.match(lines[0]):
        return lines[0].strip() if lines else ""
    telling = [line for line in lines[1:] if not _DETAILS.match(line)]
    if not telling:
        return lines[0].strip()
    # Keras says it before the arguments; TensorFlow and Spark after the stack.
    said = telling[0] if "when calling" in lines[0] else telling[-1]
    kind = re.match(r"\w+(?=: Graph)", lines[0])
    return f"{kind[0]}: {said.strip()}" if kind else said.strip()
