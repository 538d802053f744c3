"""The TCP sockets of this process that callers have connected to its ports, as Linux shows them in /proc.

gRPC accepts, reads and closes these sockets. Nothing here reads or writes them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_CURRENT, _CGROUP_MAX = Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.max")
_BYTES_RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received in struct tcp_info, since Linux 4.1
_UNSPECIFIED = struct.pack("@H14x", socket.AF_UNSPEC)  # struct sockaddr
_MAPPED = "::ffff:"  # an IPv4 address as IPv6

AVAILABLE = _DESCRIPTORS.is_dir() and _STATM.is_file()
"""Whether this system shows a process its sockets and its memory."""

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Connection:
    """An accepted connection. `peer` is the other side, as gRPC's `context.peer()` writes it."""

    descriptor: int
    port: int  # of ours
    peer: str
    received: int  # bytes, whether gRPC has read them or not


def descriptors() -> int:
    """How many descriptors this process has open: sockets, files and others."""
    return len(os.listdir(_DESCRIPTORS))


def connections(ports: Collection[int]) -> list[Connection]:
    """The connections to these ports now."""
    found = []
    for entry in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile, or no connected socket
            if os.readlink(_DESCRIPTORS / entry).startswith("socket:"):
                with _duplicate(int(entry)) as one:
                    if _is_tcp(one) and (port := one.getsockname()[1]) in ports:
                        peer = _written(one.getpeername())
                        found.append(Connection(int(entry), port, peer, _received(one)))
    return found


def reset(connection: Connection) -> bool:
    """End a connection at once; what it sent and nobody has read is dropped. Whether it was still there.

    Connecting a socket to no address resets its connection, and the owner of the descriptor reads
    ECONNRESET. `shutdown` would leave the unread bytes, which are megabytes, to be read.
    """
    with suppress(OSError), _duplicate(connection.descriptor) as one:
        if _is_tcp(one) and _written(one.getpeername()) == connection.peer:
            return bool(_libc.connect(one.fileno(), _UNSPECIFIED, len(_UNSPECIFIED)) == 0)
    return False


def resident_bytes() -> int:
    """This process's memory."""
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")


def scarce_memory(fraction: float) -> bool:
    """Whether less than this fraction of the machine's memory, or of the control group's, is available."""
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        total, available = (int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        if available < fraction * total:
            return True
    with suppress(OSError, ValueError):  # no control group, or one without a limit
        limit = int(_CGROUP_MAX.read_text())
        return limit - int(_CGROUP_CURRENT.read_text()) < fraction * limit
    return False


def give_back_memory() -> None:
    """Return freed memory to the system, which glibc keeps otherwise."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _duplicate(descriptor: int) -> socket.socket:
    """The same socket under a descriptor that nobody else closes."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def _is_tcp(one: socket.socket) -> bool:
    return one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM


def _received(one: socket.socket) -> int:
    (received,) = _BYTES_RECEIVED.unpack_from(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    return int(received)


def _written(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host, port = address[0].removeprefix(_MAPPED).partition("%")[0], address[1]
    scope = f"%25{address[3]}" if len(address) == 4 and address[3] else ""
    return f"ipv6:%5B{host}{scope}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
