"""Addresses of schedulers: one spelling for each, and whether it leads to this machine alone."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

_PLACE = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9_.-]+)):0*([1-9][0-9]{0,4})", re.ASCII)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
"""A name that ends in such a label is an IPv4 address to some resolvers: 127.1, 2130706433, 0x7f000001."""
_SCHEME = re.compile(r"(?:ipv4:|ipv6:|dns:(?://[^/]*/)?)")
_MAX_NAME = 253


def one_spelling(address: str) -> str:
    """HOST:PORT as the directory has it: HOST is an IPv4 address, an [IPv6] one, or an ASCII name of DNS.

    Names are in lower case without a last dot, IPv6 addresses in their short form, those that stand for IPv4
    addresses as these. Raises ValueError for what is none, or leads to no one host.
    """
    match = _PLACE.fullmatch(address)
    if match is None:
        raise ValueError(
            "must be HOST:PORT, HOST a name of DNS in ASCII, an IPv4 address or an [IPv6 address]"
        )
    six, name, port = match.groups()
    if int(port) >= 1 << 16:
        raise ValueError(f"{port} is no port")
    host = _host(six) if six is not None else _name(name)
    return f"{host}:{int(port)}"


@lru_cache(maxsize=1 << 14)  # of a directory's addresses, for each watcher
def is_here(address: str) -> bool:
    """Whether an address leads to this machine alone: a loopback address, a name of it, or a Unix socket.

    `address` is one of the directory, or one for gRPC ("unix:...", "ipv4:...", "dns:///...").
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    try:
        host = one_spelling(_SCHEME.sub("", address, count=1)).rpartition(":")[0]
    except ValueError:
        return False
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _host(text: str) -> str:
    """An IP address. Raises ValueError."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"{text} is no IP address") from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    four = isinstance(address, ipaddress.IPv4Address)
    # 0.0.0.0/8 is "this network", which Linux takes for this machine; 240.0.0.0/4 is broadcast and reserved.
    no_host = four and (address.packed[0] == 0 or address.packed[0] >= 240)
    if address.is_unspecified or address.is_multicast or no_host:
        raise ValueError(f"{text} is the address of no one host")
    return str(address) if four else f"[{address}]"


def _name(text: str) -> str:
    """An IPv4 address or a name of DNS. Raises ValueError."""
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return _host(name)
    if len(name) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text[:_MAX_NAME]} is no name of DNS")
    return name
