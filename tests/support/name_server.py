"""A DNS server for names of the tests, whose addresses they may change at any time."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_TYPE_A = 1
_POINTER_TO_QUESTION = b"\xc0\x0c"


class NameServer:
    """Answers questions for A records from `addresses`, with a time to live of 0, and others with nothing."""

    def __init__(self) -> None:
        self.addresses: dict[str, Sequence[str]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)

    def target(self, name: str, port: int) -> str:
        """The gRPC target that asks this server for a name."""
        return f"dns://127.0.0.1:{self.port}/{name}:{port}"

    def _serve(self) -> None:
        while True:
            question, peer = self._socket.recvfrom(512)
            if not question:  # sent by `running`, to end the thread
                return
            self._socket.sendto(self._answer(question), peer)

    def _answer(self, question: bytes) -> bytes:
        """The reply to a message with one question. Its header has 12 bytes; labels have a byte of length."""
        end, labels = 12, []
        while length := question[end]:
            labels.append(question[end + 1 : end + 1 + length].decode())
            end += 1 + length
        end += 1
        (kind,) = struct.unpack_from(">H", question, end)
        found = self.addresses.get(".".join(labels), ()) if kind == _TYPE_A else ()
        header = question[:2] + struct.pack(">HHHHH", 0x8180, 1, len(found), 0, 0)
        record = _POINTER_TO_QUESTION + struct.pack(">HHIH", _TYPE_A, 1, 0, 4)
        return header + question[12 : end + 4] + b"".join(record + socket.inet_aton(one) for one in found)

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[NameServer]:
        """A server, which ends with the block."""
        server = cls()
        server._thread.start()
        try:
            yield server
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", ("127.0.0.1", server.port))
            server._thread.join()
            server._socket.close()
