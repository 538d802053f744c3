"""The identity of a caller: the unit of fairness and quotas, and the owner of its requests."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from urllib.parse import unquote

MAX_PRIORITY = (1 << 31) - 1
"""The highest priority of a request: the largest int32."""

LOCAL = "local"
"""The one name of all callers from this machine without a token or certificate."""

_MAX_NAME = 128
_IPV6_PREFIX = 64  # a provider's customer has at least a /64, and may change addresses within it at will


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. Identities of different kinds differ, even if their names are equal."""

    name: str
    kind: Literal["token", "certificate", "peer"]  # the source of the name
    weight: float = 1.0  # share of the service, relative to other identities
    max_priority: int = 0  # highest priority of its requests
    admin: bool = False  # may act on other identities' requests, and call AdminService
    directory: bool = False  # may announce a scheduler; administrators do not have it by being such


def token_hash(token: str) -> str:
    """The SHA-256 of a token in hex, as a tokens file holds it."""
    return hashlib.sha256(token.encode()).hexdigest()


def certificate_name(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """The subject of a verified client certificate, as `cn:NAME` or `san:NAME`.

    The name of a renewed certificate is the same. A certificate without a subject is named by its
    fingerprint, `sha256:HEX`. "" if the caller sent no certificate.
    """
    for kind, key in (("cn", "x509_common_name"), ("san", "x509_subject_alternative_name")):
        for value in auth_context.get(key, ()):
            if name := _printable(value):
                return f"{kind}:{name}"
    for certificate in auth_context.get("x509_pem_cert", ()):
        return f"sha256:{hashlib.sha256(certificate).hexdigest()}"
    return ""


@lru_cache(maxsize=1024)  # by connection, of which one caller makes many calls
def peer_name(peer: str) -> str:
    """The host of a gRPC peer ("ipv4:10.0.0.1:5", "ipv6:%5B::1%5D:5", "unix:..."), without its port.

    For an IPv6 address, the name is its /64 network. Loopback addresses and Unix sockets are `LOCAL`.
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind.startswith("unix") or kind not in ("ipv4", "ipv6"):
        return LOCAL if kind.startswith("unix") else "unknown"
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif not address.is_loopback:
            return str(ipaddress.IPv6Network((int(address), _IPV6_PREFIX), strict=False))
    return LOCAL if address.is_loopback else str(address)


def _printable(value: bytes) -> str:
    text = value.decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)[:_MAX_NAME].strip()
