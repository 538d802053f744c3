"""Ports on which a server can be restarted."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(15_000, 30_000)  # which no client's connection and no port 0 takes meanwhile


def kept_port() -> int:
    """A free port that stays free while its server is away."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):  # nothing listens
                return port
