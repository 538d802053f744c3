"""Asks the OpenAI gateway on this machine how it is."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from http import HTTPStatus

_TIMEOUT_S = 3.0


def probe_status(host: str, port: int, path: str, *, tls: bool) -> int | None:
    """The HTTP status of GET `path`; None: no answer within _TIMEOUT_S seconds. Blocks.

    `host`: where the gateway listens. With `tls`, its certificate is not checked: it need not name loopback.
    """
    where = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = (
        _encrypted(where, port) if tls else http.client.HTTPConnection(where, port, timeout=_TIMEOUT_S)
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


async def is_ready(host: str, port: int, *, tls: bool) -> bool:
    """Whether one of its schedulers serves, so that it takes requests; arguments as for `probe_status`."""
    return await asyncio.to_thread(probe_status, host, port, "/readiness", tls=tls) == HTTPStatus.OK


def _encrypted(host: str, port: int) -> http.client.HTTPSConnection:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
