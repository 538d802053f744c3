"""Whether an address is free to listen on, asked before a model is loaded for it."""

from __future__ import annotations

import errno
import socket

from paceline.cli.common import fail
from paceline.cli.listener import listener


def require_free(host: str, port: int, option: str) -> None:
    """Exit with advice if this port of this host is taken, or is no address of this machine.

    `option` is what chooses it. Port 0 means any free one. Another program may still take the port later.
    """
    if port == 0:
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taker = listener(port) or "another program"
            fail(f"port {port} of {host} is taken by {taker}: choose one with {option}, or 0")
        fail(f"can't listen on port {port} of {host}: {error.strerror}")
