"""Pages of the gateway: the chat at /, and /docs with the schema of requests. No page loads others' files."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from paceline_openai.exchange import Exchange
from paceline_openai.fields import Field
from paceline_openai.routes import ENDPOINTS, Endpoint

_KINDS = {"css": b"text/css; charset=utf-8", "js": b"text/javascript; charset=utf-8"}
ASSETS: Mapping[str, bytes] = {
    f"/page/{name}": _KINDS[name.rpartition(".")[2]]
    for name in ("api.js", "chat.css", "chat.js", "conversation.js", "store.js", "turns.js")
}
"""Files of the chat page, and their types."""
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
_HTML = (b"content-type", b"text/html; charset=utf-8")


async def docs(exchange: Exchange) -> None:
    """GET /docs."""
    await exchange.reply(_docs(), headers=[_HTML, *_HEADERS])


async def schema(exchange: Exchange) -> None:
    """GET /openapi.json."""
    await exchange.reply(_schema(), headers=[(b"content-type", b"application/json"), *_HEADERS])


async def chat(exchange: Exchange) -> None:
    """GET /."""
    await exchange.reply(_file("/page/index.html"), headers=[_HTML, *_HEADERS])


async def asset(exchange: Exchange) -> None:
    """A file of the chat page."""
    headers = [(b"content-type", ASSETS[exchange.path]), *_HEADERS]
    await exchange.reply(_file(exchange.path), headers=headers)


@cache
def _file(path: str) -> bytes:
    return files("paceline_openai").joinpath(path.removeprefix("/")).read_bytes()


@cache
def _docs() -> bytes:
    parts = [_section(endpoint) for endpoint in ENDPOINTS]
    title = "OpenAI API of Paceline"
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><h1>{title}</h1><p><a href=openapi.json>Schema</a></p>"
        f"{''.join(parts)}</html>"
    )
    return page.encode()


def _section(endpoint: Endpoint) -> str:
    title = html.escape(f"{endpoint.method} {endpoint.path}")
    head = f"<h2><code>{title}</code></h2><p>{html.escape(endpoint.about)}</p>"
    if endpoint.table is None:
        return head
    rows = "".join(
        f"<tr><td><code>{html.escape(field.name)}</code></td><td>{html.escape(field.state)}</td>"
        f"<td>{html.escape(field.note)}</td></tr>"
        for field in endpoint.table.fields.values()
    )
    return f"{head}<table border=1><tr><th>field</th><th></th><th></th></tr>{rows}</table>"


@cache
def _schema() -> bytes:
    paths = {endpoint.path: {endpoint.method.lower(): _operation(endpoint)} for endpoint in ENDPOINTS}
    info = {"title": "OpenAI API of Paceline", "version": "1"}
    return json.dumps({"openapi": "3.1.0", "info": info, "paths": paths}, indent=1).encode()


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": endpoint.about, "responses": {"200": {"description": "OK"}}}
    if endpoint.table is not None:
        fields = endpoint.table.fields.values()
        body = {
            "type": "object",
            "properties": {field.name: _property(field) for field in fields},
            "required": [field.name for field in fields if field.required],
            "additionalProperties": False,
        }
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found


def _property(field: Field) -> dict[str, Any]:
    found: dict[str, Any] = {"description": field.note}
    if field.kind is None:
        found["enum"] = [*field.defaults, None]
    return found
