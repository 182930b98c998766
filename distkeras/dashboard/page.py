"""The page: HTML with its script, its style and its data, and the policy that allows only these."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from distkeras.dashboard.watch import Entry

_OWN = (
    "words",
    "dom",
    "feed",
    "state",
    "plots",
    "charts",
    "tables",
    "job",
    "compare",
    "page",
    "actions",
    "server",
    "begin",
)
_STYLES = ("uPlot.min.css", "page.css")


class Page(NamedTuple):
    """HTML as bytes, and its Content-Security-Policy."""

    html: bytes
    policy: str


def live_page(jobs: int, *, frames: str = "'none'") -> Page:
    """Return a page that follows the journals at ``jobs/0`` and so on; ``frames`` may show it in a frame."""
    data = {"mode": "live", "streams": [f"jobs/{number}" for number in range(jobs)]}
    return Page(_html(data).encode(), _policy("'self'", frames))


def server_page() -> Page:
    """Return a page that asks its reader for a token, and follows the jobs of a job server."""
    return Page(_html({"mode": "server"}).encode(), _policy("'self'", "'none'"))


def saved_page(
    journals: Sequence[Sequence[Entry]], names: Sequence[str] = (), outside: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return a page with the present state of jobs, which needs no other file.

    ``outside`` is the job server's description of each job; empty without a job server.
    """
    data: dict[str, Any] = {
        "mode": "saved",
        "journals": [[json.loads(entry.data) for entry in lines] for lines in journals],
    }
    data |= {"names": list(names), "outside": list(outside)}
    return _html(data, meta=_policy("'none'", None))


def _policy(connect: str, frames: str | None) -> str:
    parts = ["default-src 'none'", f"script-src {_hash(_script())}", f"style-src {_hash(_style())}", "img-src data:"]
    parts += [f"connect-src {connect}", "base-uri 'none'", "form-action 'none'"]
    return "; ".join(parts if frames is None else [*parts, f"frame-ancestors {frames}"])


def _html(data: Mapping[str, Any], meta: str = "") -> str:
    policy = f'<meta http-equiv="Content-Security-Policy" content="{meta}">\n' if meta else ""
    return _PAGE.format(policy=policy, style=_style(), script=_script(), data=_json(data))


def _json(value: Mapping[str, Any]) -> str:
    """Return JSON without characters that could end its HTML element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _script() -> str:
    own = "\n".join(_read(f"{name}.js") for name in _OWN)
    return f'{_read("uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{own}\n}})();\n'


@cache
def _style() -> str:
    return "\n".join(map(_read, _STYLES))


def _read(name: str) -> str:
    return (files("distkeras.dashboard") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{policy}<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>distkeras dashboard</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="page"></div>
<noscript>This page draws its charts with a script, which this browser does not run.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""
