"""DNS names as addresses: one name may stand for several schedulers, over which its channel spreads calls."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections import Counter

_SCHEME = re.compile(r"^(unix|unix-abstract|ipv4|ipv6|vsock|xds):")
_URL = re.compile(r"^(?!dns:|unix:|unix-abstract:|xds:)[\w+.-]+://")
_DNS = re.compile(r"^dns:(//[^/]*/)?")

ROUND_ROBIN: tuple[tuple[str, int | str], ...] = (
    # gRPC's default is one connection, to the first address that answers, for all calls.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    # The name is resolved again when a connection ends, at most this often. Default: 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
)
"""Channel options that connect to all addresses of a name, and send each call to the next one."""


def check_address(address: str) -> None:
    """Raises ValueError for a URL, whose scheme gRPC would take for a part of a name, and for a bare host.

    gRPC would call a bare host at port 443. Who means that names the port, or writes `dns:///host`.
    """
    if _URL.match(address):
        raise ValueError(f"{address}: give host:port without {address.partition('//')[0]}//")
    if (port := address.removeprefix(":")).isdigit():
        raise ValueError(f"{address}: its host is missing, as in 127.0.0.1:{port}")
    if ":" not in address or (address.startswith("[") and address.endswith("]")):
        raise ValueError(f"{address}: its port is missing, as in {address}:50051")


def dns_name(address: str) -> str | None:
    """The DNS name in an address (`name:port`, `dns:///name:port`); None if it has none.

    IP addresses, Unix sockets and `localhost`, whose addresses lead to one process, have none.
    """
    if _SCHEME.match(address):
        return None
    place = _DNS.sub("", address)
    host = place if _is_ip(place) else place.rpartition(":")[0] or place
    if host == "localhost" or _is_ip(host.strip("[]")):
        return None
    return host or None


def schedulers_behind(address: str) -> int:
    """How many schedulers an address may stand for, at least 1: the addresses of its name. Blocks.

    Addresses of both IP versions belong to the same hosts, so those of one version are counted.
    """
    name = dns_name(address)
    if name is None:
        return 1
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: no name of DNS
        return 1
    versions = Counter(family for family, _ in {(one[0], one[4][0]) for one in found})
    return max(versions.values(), default=1)


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
