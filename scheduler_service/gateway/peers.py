"""The owner of the other end of a TCP connection on this machine, asked of the Linux kernel."""

from __future__ import annotations

import ipaddress
import socket
import struct
from urllib.parse import unquote

_NETLINK_SOCK_DIAG = 4  # linux/netlink.h
_SOCK_DIAG_BY_FAMILY = 20  # linux/sock_diag.h
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port id
_ANY_STATE = 0xFFFFFFFF
_NO_COOKIE = 0xFFFFFFFF
_UID_OFFSET = (
    _HEADER.size + 4 + 48 + 12
)  # of idiag_uid: behind the states, the socket's id and three counters
_TIMEOUT_S = 1.0


def owner_of_peer(peer: str, port: int) -> int | None:
    """The user id that owns the client's end of a loopback connection to `port`.

    `peer`: the client's address, as gRPC writes it ("ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5"). None: there is
    no such connection, it is not on loopback, or the system does not tell. Takes some 30 µs.
    """
    kind, _, rest = unquote(peer).partition(":")
    host, _, its_port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not its_port.isdigit():
        return None
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not address.is_loopback:
        return None
    server = "127.0.0.1" if address.version == 4 else "::1"
    try:
        return _uid_of(address.packed, int(its_port), ipaddress.ip_address(server).packed, port)
    except OSError:
        return None


def _uid_of(local: bytes, local_port: int, remote: bytes, remote_port: int) -> int | None:
    """The owner of the TCP socket with these ends. Raises OSError if the kernel has no such interface."""
    family = socket.AF_INET if len(local) == 4 else socket.AF_INET6
    ends = struct.pack("!HH16s16s", local_port, remote_port, local, remote)
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY_STATE)
    request += ends + struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    netlink = getattr(socket, "AF_NETLINK", None)
    if netlink is None:
        raise OSError("no netlink")
    with socket.socket(netlink, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(header + request)
        reply = kernel.recv(4096)
    if len(reply) < _UID_OFFSET + 4 or _HEADER.unpack_from(reply)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # an error: no such socket
    uid: int = struct.unpack_from("=I", reply, _UID_OFFSET)[0]
    return uid
