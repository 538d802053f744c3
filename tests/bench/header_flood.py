"""A stranger that floods a port that speaks HTTP/2 with headers, for tests and benchmarks over loopback.

usage: python -m tests.bench.header_flood KIND HOST:PORT [--connections 4] [--seconds 3] [--mb 64]

KIND is one of

    references    an entry of 3,000 bytes in HPACK's table, and 4,000 references to it in each call
    literals      calls of 15 KB of headers, none of them in the table
    continuation  one call whose headers never end: CONTINUATION frames without END_HEADERS
    streams       calls with few headers and no end, as many as go
    confirmed     literals, by a peer that confirms the server's settings, which gRPC then enforces

The others never confirm the settings, and nobody sends credentials. It prints the megabytes that it sent and
the connections that the server ended, as JSON.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import struct
import time
from collections.abc import Iterator

KINDS = ("references", "literals", "continuation", "streams", "confirmed")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_HEADERS, _CONTINUATION = 1, 9
_CONFIRMATION = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
_END_HEADERS = 4
_POST_AND_HTTP = b"\x83\x86"  # of HPACK's static table
_NEWEST = b"\xbe"  # the entry that was added last


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _integer(value: int, bits: int, first: int) -> bytes:
    """An integer as HPACK writes it, in the last `bits` of a byte that begins with `first`."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    out, value = bytearray((first | most,)), value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes((*out, value))


def _literal(name: bytes, value: bytes, first: int) -> bytes:
    """A header field with a name of its own; `first` 0x40 adds it to the table, 0 doesn't."""
    return bytes((first,)) + _integer(len(name), 7, 0) + name + _integer(len(value), 7, 0) + value


_CALL = (
    _POST_AND_HTTP
    + _literal(b":path", b"/paceline.scheduler.v1.SchedulerService/Generate", 0)
    + _literal(b":authority", b"a", 0)
    + _literal(b"te", b"trailers", 0)
    + _literal(b"content-type", b"application/grpc", 0)
)


def frames(kind: str) -> Iterator[bytes]:
    """What one connection sends, without end."""
    yield _PREFACE
    if kind == "references":
        entry = _literal(b"x-long", b"v" * 3000, 0x40)
        yield _frame(_HEADERS, _END_HEADERS, 1, _CALL + entry + _NEWEST * 4000)
        for stream in range(3, 1 << 31, 2):
            yield _frame(_HEADERS, _END_HEADERS, stream, _CALL + _NEWEST * 4000)
    elif kind in ("literals", "confirmed"):
        fields = b"".join(_literal(b"x%d" % i, b"v" * 480, 0) for i in range(30))
        for stream in range(1, 1 << 31, 2):
            yield _frame(_HEADERS, _END_HEADERS, stream, _CALL + fields)
    elif kind == "continuation":
        yield _frame(_HEADERS, 0, 1, _CALL)
        fields = b"".join(_literal(b"x%d" % i, b"v" * 480, 0) for i in range(30))
        while True:
            yield _frame(_CONTINUATION, 0, 1, fields)
    else:
        for stream in range(1, 1 << 31, 2):
            yield _frame(_HEADERS, _END_HEADERS, stream, _CALL)


class _Peer:
    def __init__(self, address: tuple[str, int], kind: str) -> None:
        self.socket = socket.create_connection(address, 10)
        self.socket.setblocking(False)
        self._frames, self._left = frames(kind), b""
        self._hears = kind != "confirmed"
        self.sent = 0

    def send(self) -> None:
        """Send what the server takes now. Raises OSError when it has ended the connection."""
        if self.sent and not self._hears:
            return
        try:
            while True:
                self._left = self._left or b"".join(next(self._frames) for _ in range(8 if self.sent else 1))
                count = self.socket.send(self._left)
                self.sent, self._left = self.sent + count, self._left[count:]
        except BlockingIOError:
            pass

    def receive(self) -> None:
        """Read and drop. Raises OSError when the server has ended the connection."""
        if not self.socket.recv(1 << 16):
            raise ConnectionResetError
        if not self._hears:  # these were the server's settings
            self._hears, self._left = True, self._left + _CONFIRMATION


def flood(
    host: str, port: int, kind: str, connections: int, seconds: float, most_bytes: int
) -> tuple[int, int]:
    """Flood until a bound is reached; returns the bytes sent, and how often the server ended a connection.

    A connection that was ended is replaced, as long as the server takes new ones.
    """
    selector, ended, gone = selectors.DefaultSelector(), 0, 0
    until = time.monotonic() + seconds

    def connect() -> bool:
        try:
            peer = _Peer((host, port), kind)
        except OSError:
            return False
        selector.register(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        return True

    for _ in range(connections):
        connect()
    while time.monotonic() < until:
        peers = [key.data for key in selector.get_map().values()]
        if gone + sum(peer.sent for peer in peers) >= most_bytes:
            break
        while len(peers) < connections and connect():
            peers.append(None)
        for key, events in selector.select(0.1):
            peer = key.data
            try:
                if events & selectors.EVENT_READ:
                    peer.receive()
                if events & selectors.EVENT_WRITE:
                    peer.send()
            except OSError:
                gone, ended = gone + peer.sent, ended + 1
                selector.unregister(peer.socket)
                peer.socket.close()
    for key in list(selector.get_map().values()):
        gone += key.data.sent
        key.data.socket.close()
    return gone, ended


def main() -> None:
    """Flood one port."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("address", help="of loopback")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--mb", type=float, default=64.0)
    arguments = parser.parse_args()
    host, _, port = arguments.address.rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        parser.error("only loopback is flooded")
    sent, ended = flood(
        host, int(port), arguments.kind, arguments.connections, arguments.seconds, int(arguments.mb * 1e6)
    )
    print(json.dumps({"sent_mb": sent / 1e6, "ended": ended}))


if __name__ == "__main__":
    main()
