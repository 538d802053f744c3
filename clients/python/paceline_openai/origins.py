"""Which web pages may call: those of the origins that are named, and the gateway's own page."""

from __future__ import annotations

import ipaddress
from http import HTTPStatus

from paceline_openai.exchange import Exchange
from paceline_openai.refusals import Refusal

_ALLOWED = (
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"*, authorization"),
    (b"access-control-max-age", b"600"),
)


class Origins:
    """Refuses calls of web pages, which browsers mark by an Origin header, unless their origin may call.

    `local`: as of `Gateway`.
    """

    def __init__(self, allowed: tuple[str, ...], *, local: bool) -> None:
        self._allowed, self._local = frozenset(allowed), local

    async def answered(self, exchange: Exchange) -> bool:
        """Check a request; True if it was a browser's question, which is answered. Raises Refusal (403)."""
        host = exchange.header(b"host")
        if self._local and host and not _is_local(host):
            raise _refused(f"Host: {host[:200]} is no name of this machine's loopback address")
        origin = exchange.header(b"origin")
        if not origin or (host and origin.partition("://")[2] == host):
            return False
        if not self._allowed & {origin, "*"}:
            raise _refused(f"Origin: pages of {origin[:200]} may not call; --cors-origin allows it")
        exchange.extra_headers += [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"origin"),
        ]
        if exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method"):
            await exchange.reply(b"", HTTPStatus.NO_CONTENT, _ALLOWED)
            return True
        return False


def _is_local(host: str) -> bool:
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    name = name.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _refused(message: str) -> Refusal:
    return Refusal(HTTPStatus.FORBIDDEN, message, "permission_error", "permission_denied", close=True)
