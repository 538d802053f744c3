"""The kernel tells which user called a port on loopback."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from scheduler_service.gateway.peers import owner_of_peer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")


@pytest.mark.parametrize(
    ("family", "host", "peer"),
    [(socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}")],
)
def test_the_caller_of_a_port_is_the_user_of_its_process(family: int, host: str, peer: str) -> None:
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            its_port = client.getsockname()[1]
            assert owner_of_peer(peer.format(its_port), port) == os.getuid()
            assert owner_of_peer(peer.format(its_port), port + 1) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root acts for other users")
def test_a_process_of_another_user_is_told_apart() -> None:
    other = 65534
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        os.seteuid(other)
        try:
            client = socket.socket()  # it belongs to the user who made it
        finally:
            os.seteuid(0)
        with client:
            client.connect(("127.0.0.1", port))
            assert owner_of_peer(f"ipv4:127.0.0.1:{client.getsockname()[1]}", port) == other


@pytest.mark.parametrize(
    "peer", ["unix:", "ipv4:10.0.0.1:5", "ipv4:127.0.0.1:x", "nonsense", "ipv6:%5Bx%5D:1"]
)
def test_who_is_not_on_loopback_has_no_owner(peer: str) -> None:
    assert owner_of_peer(peer, 1) is None
