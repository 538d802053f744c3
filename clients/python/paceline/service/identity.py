"""Who a caller is: the unit of fairness, of quotas, and of what may be aborted."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

MAX_PRIORITY = (1 << 31) - 1
"""Of any request: the largest int32."""

LOCAL = "local"
"""The name of whoever calls from this machine without a credential: all its addresses are one caller."""

_MAX_NAME = 128
_IPV6_PREFIX = 64  # what one customer of a provider has: single addresses of it are free to change


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. Names of different kinds never collide: `kind` is how the name was found."""

    name: str
    kind: Literal["token", "certificate", "peer"]
    weight: float = 1.0  # its share beside other identities
    max_priority: int = 0  # of its requests
    admin: bool = False  # may act on what belongs to others


def token_hash(token: str) -> str:
    """The SHA-256 of a token in hex: what a tokens file holds instead of it."""
    return hashlib.sha256(token.encode()).hexdigest()


def certificate_name(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """The subject of a verified client certificate, as `cn:NAME` or `san:NAME`.

    The authority vouches for the subject, so that a renewed certificate is the same caller. One without
    any is named by its fingerprint, `sha256:HEX`. "" where the caller showed no certificate.
    """
    for kind, key in (("cn", "x509_common_name"), ("san", "x509_subject_alternative_name")):
        for value in auth_context.get(key, ()):
            if name := _printable(value):
                return f"{kind}:{name}"
    for certificate in auth_context.get("x509_pem_cert", ()):
        return f"sha256:{hashlib.sha256(certificate).hexdigest()}"
    return ""


def peer_name(peer: str) -> str:
    """The host of a gRPC peer ("ipv4:10.0.0.1:5", "ipv6:%5B::1%5D:5", "unix:..."), without its port.

    An IPv6 address stands for its /64. Loopback and Unix sockets are `LOCAL`.
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
