"""The OpenAPI description, made of the table of endpoints, and a page of it that needs nothing but a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from typing import Any

import distkeras
from distkeras.dashboard.journal import STREAM_TYPE
from distkeras.job_server.server.endpoints import BYTES, ENDPOINTS, JSON, PREFIX, Endpoint
from distkeras.job_server.server.views import ERROR

#: What any endpoint may answer in place of what it should.
_ERRORS = {
    "400": "The request cannot be read.",
    "401": "No valid token.",
    "403": "It takes another role.",
    "404": "There is no such thing, or it belongs to another user.",
    "409": "The state does not allow it.",
    "413": "Too much.",
    "415": "Another type of content.",
    "422": "What was sent cannot work; `field` says which part.",
    "429": "Too many failures from this address.",
    "507": "The server's disk is nearly full.",
}


@cache
def openapi() -> dict[str, Any]:
    """The description, of OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(PREFIX + endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "distkeras job server",
            "version": distkeras.__version__,
            "description": "Trains Keras models on Spark. Times are seconds since the epoch.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": ERROR},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    named = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    named += [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in endpoint.query.items()]
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary + (" For administrators." if endpoint.admin else ""),
        "responses": {
            str(endpoint.status): _good_answer(endpoint),
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }
    if named:
        operation["parameters"] = named
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(endpoint, endpoint.body)}
    return operation


def _good_answer(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.answer is None:
        # Of a stream, a schema would be that of its events.
        content = {} if endpoint.media == STREAM_TYPE else {"schema": {"type": "string", "format": "binary"}}
        return {"description": "The file.", "content": {endpoint.media: content}}
    if not endpoint.answer:
        return {"description": "Done."}
    return {"description": "The answer.", "content": {JSON: {"schema": dict(endpoint.answer)}}}


def _content(endpoint: Endpoint, schema: Mapping[str, Any]) -> dict[str, Any]:
    if not endpoint.upload:
        return {JSON: {"schema": dict(schema)}}
    form = {
        "type": "object",
        "additionalProperties": False,
        "required": ["job"] if endpoint.model_optional else ["job", "model"],
        "properties": {"job": dict(schema), "model": {"type": "string", "format": "binary"}},
    }
    encoding = {"job": {"contentType": JSON}, "model": {"contentType": BYTES}}
    return {"multipart/form-data": {"schema": form, "encoding": encoding}}


@cache
def description_page() -> str:
    """The description as a page of HTML, without scripts, and without anything from elsewhere."""
    parts = []
    for endpoint in ENDPOINTS:
        operation = _operation(endpoint)
        told = {
            "parameters": operation.get("parameters"),
            "body": operation.get("requestBody"),
            "answer": operation["responses"][str(endpoint.status)],
        }
        blocks = "".join(
            f"<details><summary>{name}</summary><pre>{escape(json.dumps(value, indent=2))}</pre></details>"
            for name, value in told.items()
            if value
        )
        title = f"<code>{endpoint.method} {escape(PREFIX + endpoint.path)}</code>"
        parts.append(
            f'<section id="{endpoint.name}"><h2>{title}</h2><p>{escape(operation["summary"])}</p>{blocks}</section>'
        )
    return _PAGE.replace("SECTIONS", "\n".join(parts))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>distkeras job server</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h2 { font-size: 1.1rem; margin: 1.5rem 0 0; }
p { margin: .25rem 0; }
pre { overflow-x: auto; font-size: .85rem; }
</style>
</head>
<body>
<main>
<h1>distkeras job server</h1>
<p>Each request has a token in its header: <code>Authorization: Bearer dk_…</code>.
<a href="/openapi.json">openapi.json</a> says the same as this page, for programs.</p>
SECTIONS
</main>
</body>
</html>
"""
