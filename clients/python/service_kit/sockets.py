"""The TCP sockets of this process that callers have connected to its ports, as Linux shows them.

gRPC accepts, reads and closes these sockets. Nothing here reads or writes them.

All but `descriptors` and `give_back_memory` keep the interpreter's lock, for which `ctypes.PyDLL` is. While
an event loop decodes a flood's headers, who gives the lock back waits up to 10 ms for it: `os.listdir` would
do so for each entry, and one look at the connections took 0.4 s. None of these calls waits for anything else.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DESCRIPTORS, _STATUS = "/proc/self/fd", "/proc/self/status"
_STATM, _MEMINFO = "/proc/self/statm", "/proc/meminfo"
_CGROUP_CURRENT, _CGROUP_MAX = "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.max"
_BYTES_RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received in struct tcp_info, since Linux 4.1
_UNSPECIFIED = struct.pack("@H26x", socket.AF_UNSPEC)  # struct sockaddr, as long as one of IPv6
_MAPPED = "::ffff:"  # an IPv4 address as IPv6
_FILE_BYTES = 16 << 10

AVAILABLE = all(Path(one).is_file() for one in (_STATUS, _STATM)) and "FDSize:" in Path(_STATUS).read_text()
"""Whether this system shows a process its descriptors and its memory."""

_libc = ctypes.PyDLL(None)
_unlocked_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Connection:
    """An accepted connection. `peer` is the other side, as gRPC's `context.peer()` writes it."""

    descriptor: int
    port: int  # of ours
    peer: str
    received: int  # bytes, whether gRPC has read them or not
    unread: int = 0  # of them


class _Socket:
    """A view of a descriptor, which need not be a socket's. Its buffers serve one descriptor at a time."""

    def __init__(self) -> None:
        self._address, self._info = ctypes.create_string_buffer(28), ctypes.create_string_buffer(256)
        self._size = ctypes.c_uint32()

    def port(self, descriptor: int) -> int | None:
        """The port of this side of a connection or of a listening socket; None: neither, or not of IP."""
        return self._port() if self._ask(_libc.getsockname, descriptor) else None

    def peer(self, descriptor: int) -> str | None:
        """The other side of a connection; None: there is none."""
        if not self._ask(_libc.getpeername, descriptor):
            return None
        address = self._address.raw
        if self._family() == socket.AF_INET:
            return f"ipv4:{socket.inet_ntop(socket.AF_INET, address[4:8])}:{self._port()}"
        host = socket.inet_ntop(socket.AF_INET6, address[8:24])
        if host.startswith(_MAPPED):
            return f"ipv4:{host.removeprefix(_MAPPED)}:{self._port()}"
        number = int.from_bytes(address[24:28], sys.byteorder)
        scope = f"%25{number}" if number else ""
        return f"ipv6:%5B{host}{scope}%5D:{self._port()}"

    def received(self, descriptor: int) -> int | None:
        """Bytes that a TCP connection has received; None: the descriptor has no such connection."""
        self._size.value = len(self._info)
        size = ctypes.byref(self._size)
        if _libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, self._info, size):
            return None
        return int(_BYTES_RECEIVED.unpack_from(self._info)[0])

    def unread(self, descriptor: int) -> int:
        """Bytes that were received and not read yet."""
        self._size.value = 0
        _libc.ioctl(descriptor, termios.FIONREAD, ctypes.byref(self._size))
        return self._size.value

    def _ask(self, call: Any, descriptor: int) -> bool:
        """Have getsockname or getpeername write an address; returns whether it is one of IP."""
        self._size.value = len(self._address)
        answered = call(descriptor, self._address, ctypes.byref(self._size)) == 0
        return answered and self._family() in (socket.AF_INET, socket.AF_INET6)

    def _family(self) -> int:
        return int.from_bytes(self._address.raw[:2], sys.byteorder)

    def _port(self) -> int:
        return int.from_bytes(self._address.raw[2:4], "big")


def descriptors() -> int:
    """How many descriptors this process has open: sockets, files and others."""
    count = os.stat(_DESCRIPTORS).st_size  # since Linux 6.2
    return count or sum(_libc.fcntl(one, fcntl.F_GETFD) >= 0 for one in range(_descriptor_bound()))


def connections(ports: Collection[int]) -> list[Connection]:
    """The connections that callers have to these ports of this process now: looks at every descriptor."""
    found, view = [], _Socket()
    for descriptor in range(_descriptor_bound()):
        port = view.port(descriptor)
        if port is None or port not in ports or (peer := view.peer(descriptor)) is None:
            continue
        if (received := view.received(descriptor)) is not None:
            found.append(Connection(descriptor, port, peer, received, view.unread(descriptor)))
    return found


def reset(connection: Connection) -> bool:
    """End a connection at once; what it sent and nobody has read is dropped. Whether it was still there.

    Connecting a socket to no address resets its connection, and the owner of the descriptor reads
    ECONNRESET. `shutdown` would leave the unread bytes, which are megabytes, to be read.
    """
    copy = _libc.fcntl(connection.descriptor, fcntl.F_DUPFD_CLOEXEC, 0)  # which nobody else closes
    if copy < 0:
        return False
    try:
        view = _Socket()
        if view.peer(copy) != connection.peer or view.received(copy) is None:
            return False
        return bool(_libc.connect(copy, _UNSPECIFIED, len(_UNSPECIFIED)) == 0)
    finally:
        _libc.close(copy)


def resident_bytes() -> int:
    """Bytes of memory that this process has."""
    return int(_read(_STATM).split()[1]) * os.sysconf("SC_PAGESIZE")


def scarce_memory(fraction: float) -> bool:
    """Whether less than this fraction of the machine's memory, or of the control group's, is available."""
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":") for line in _read(_MEMINFO).splitlines())
        total, available = (int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        if available < fraction * total:
            return True
    with suppress(OSError, ValueError):  # no control group, or one without a limit
        limit = int(_read(_CGROUP_MAX))
        return limit - int(_read(_CGROUP_CURRENT)) < fraction * limit
    return False


def give_back_memory() -> None:
    """Return freed memory to the system, which glibc keeps otherwise."""
    if hasattr(_unlocked_libc, "malloc_trim"):
        _unlocked_libc.malloc_trim(0)


def _descriptor_bound() -> int:
    """A number above that of every open descriptor: the size of the process's table of them."""
    [line] = [line for line in _read(_STATUS).splitlines() if line.startswith("FDSize:")]
    return int(line.split()[1])


def _read(path: str) -> str:
    """A small file of the kernel's. Raises OSError."""
    descriptor = _libc.open(path.encode(), os.O_RDONLY | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(path)
    try:
        text = ctypes.create_string_buffer(_FILE_BYTES)
        count = _libc.read(descriptor, text, _FILE_BYTES)
    finally:
        _libc.close(descriptor)
    if count < 0:
        raise OSError(path)
    return text.raw[:count].decode()
