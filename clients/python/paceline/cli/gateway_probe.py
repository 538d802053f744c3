"""Asks a gateway's process how it is, over its Unix socket."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from pathlib import Path

_TIMEOUT_S = 3.0


async def probe_status(socket: Path, path: str) -> int | None:
    """The HTTP status of GET `path`; None: no answer within _TIMEOUT_S seconds."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                words = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


async def is_ready(socket: Path) -> bool:
    """Whether one of its schedulers serves, so that it takes requests."""
    return await probe_status(socket, "/health") == HTTPStatus.OK
