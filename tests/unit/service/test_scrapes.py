"""The metrics port has few connections, and gives the place of whoever sends no request to the next one."""

from __future__ import annotations

import gzip
import http.client
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app
from service_kit import scrapes
from service_kit.scrapes import MAX_CONNECTIONS, MAX_REQUEST_BYTES, ScrapePort


class Opened:
    def __init__(self) -> None:
        registry = CollectorRegistry()
        Gauge("answer", "Of all", registry=registry).set(42)
        self.server = ScrapePort(make_wsgi_app(registry))
        self.port = self.server.open("127.0.0.1", 0)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, "/metrics", headers=headers)
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
        connection.close()
        return status, body


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    opened.server.close()


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_the_metrics_are_answered_and_nothing_is_changed_by_other_methods(opened: Opened) -> None:
    status, body = opened.ask()
    assert (status, b"answer 42.0" in body) == (200, True)
    assert b"answer 42.0" in gzip.decompress(opened.ask(**{"Accept-Encoding": "gzip"})[1])
    assert opened.ask("POST")[0] == 405
    assert opened.ask("HEAD")[1] == b""


def test_idle_connections_lose_their_places_the_longest_first(opened: Opened) -> None:
    idle = [opened.connect() for _ in range(MAX_CONNECTIONS)]
    idle[0].sendall(b"GET /metrics HTTP/1.1\r\n")  # no complete request
    for _ in range(3):
        assert opened.ask()[0] == 200
    assert read_all(idle[0]) == b""
    idle[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert b"answer 42.0" in read_all(idle[-1])
    for connection in idle[1:-1]:
        connection.close()


def test_a_request_that_is_sent_piece_by_piece_is_answered(opened: Opened) -> None:
    connection = opened.connect()
    for piece in (b"GET /met", b"rics HTTP/1.1\r\nHost: a\r", b"\n\r", b"\n"):
        connection.sendall(piece)
    assert b"answer 42.0" in read_all(connection)


def test_more_connections_than_fit_are_no_more_descriptors(opened: Opened) -> None:
    idle = [opened.connect() for _ in range(5 * MAX_CONNECTIONS)]
    assert opened.ask()[0] == 200
    assert opened.server.connections <= MAX_CONNECTIONS
    assert sum(read_all(one) == b"" for one in idle[: 4 * MAX_CONNECTIONS]) == 4 * MAX_CONNECTIONS
    for connection in idle[4 * MAX_CONNECTIONS :]:
        connection.close()


def test_a_request_that_does_not_come_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "REQUEST_S", 0.01)
    opened = Opened()
    assert read_all(opened.connect()) == b""
    opened.server.close()


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/2.0\r\n\r\n", b"\xff\xfe \x00 z\r\n\r\n"]
)
def test_what_is_no_request_is_a_bad_one(opened: Opened, sent: bytes) -> None:
    connection = opened.connect()
    connection.sendall(sent)
    assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_a_request_without_an_end_is_not_kept(opened: Opened) -> None:
    connection = opened.connect()
    with suppress(ConnectionError):
        connection.sendall(b"x" * (MAX_REQUEST_BYTES + 1))
        assert connection.recv(1) == b""
    connection.close()
    assert opened.ask()[0] == 200


def test_a_port_that_is_taken_is_an_error(opened: Opened) -> None:
    with pytest.raises(OSError, match="in use"):
        ScrapePort(lambda _environ, _start: []).open("127.0.0.1", opened.port)
