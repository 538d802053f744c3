"""Which connections are reset while memory rises: strangers that send, and nobody else."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Collection

import pytest
from service_kit import sockets
from service_kit.connections import (
    ALARM_S,
    CENSUS_S,
    COUNT_S,
    RISE_BYTES,
    SENT_BYTES,
    SUSPECT_S,
    TRIMS_S,
    Connections,
)
from service_kit.sockets import Connection

PORT = 50051
MIB = 1 << 20


class Source:
    """Connections and memory as a test sets them."""

    AVAILABLE = False  # no thread: tests look by themselves

    def __init__(self) -> None:
        self.resident = 100 * MIB
        self.received: dict[str, int] = {}  # by peer
        self.unread: dict[str, int] = {}
        self.scarce = False
        self.reset_peers: list[str] = []
        self.given_back = 0

    def resident_bytes(self) -> int:
        return self.resident

    def scarce_memory(self, fraction: float) -> bool:
        assert 0 < fraction < 1
        return self.scarce

    def connections(self, ports: Collection[int]) -> list[Connection]:
        assert PORT in ports
        return [
            Connection(9, PORT, peer, count, self.unread.get(peer, 0))
            for peer, count in self.received.items()
        ]

    def descriptors(self) -> int:
        return 20 + len(self.received)

    def reset(self, one: Connection) -> bool:
        self.reset_peers.append(one.peer)
        del self.received[one.peer]
        return True

    def give_back_memory(self) -> None:
        self.given_back += 1


class Watched:
    """Connections that are looked at by hand, with a clock of the test's own."""

    def __init__(self) -> None:
        self.source = Source()
        self.connections = Connections(self.source)
        self.connections.watch(PORT, 8)
        self.now = 1000.0
        self.connections.look(self.now)

    def look(self, after_s: float = SUSPECT_S, *, turn: bool = True) -> None:
        self.now += after_s
        self.connections.look(self.now)
        if turn:
            self.connections._beat_at = self.now  # the event loop had its turn

    def send(self, peer: str, count: int = 2 * SENT_BYTES) -> None:
        if peer in self.source.received:  # it was not reset
            self.source.received[peer] += count


@pytest.fixture
async def watched() -> Watched:
    return Watched()


def flooded(watched: Watched, *, looks: int = 4, turn: bool = True) -> None:
    """Memory rises while two peers send."""
    for _ in range(looks):
        watched.source.resident += 2 * RISE_BYTES
        for peer in tuple(watched.source.received):
            watched.send(peer)
        watched.look(turn=turn)


async def test_strangers_that_send_while_memory_rises_are_reset_and_others_stay(watched: Watched) -> None:
    watched.source.received = {"stranger": 0, "admitted": 0, "idle": 0}
    watched.connections.admit("admitted")
    for _ in range(4):
        watched.source.resident += 2 * RISE_BYTES
        watched.send("stranger")
        watched.send("admitted")
        watched.look()
    assert watched.source.reset_peers == ["stranger"]


async def test_a_stranger_with_much_unread_sends_though_nothing_more_comes(watched: Watched) -> None:
    watched.source.received = {"stranger": 1 << 20, "admitted": 1 << 20, "idle": 0}
    watched.source.unread = {"stranger": 1 << 19, "admitted": 1 << 19}
    watched.connections.admit("admitted")
    watched.look(CENSUS_S)
    for _ in range(4):
        watched.source.resident += 2 * RISE_BYTES
        watched.look()
    assert watched.source.reset_peers == ["stranger"]


async def test_nobody_is_reset_while_memory_is_calm(watched: Watched) -> None:
    watched.source.received = {"stranger": 0}
    for _ in range(9):
        watched.send("stranger", 1 << 24)
        watched.look()
    assert watched.source.reset_peers == []


async def test_an_event_loop_that_stands_still_costs_no_newcomer_its_connection(watched: Watched) -> None:
    watched.source.received = {"newcomer": 0}
    flooded(watched, looks=50, turn=False)
    assert watched.source.reset_peers == []
    watched.connections.admit("newcomer")
    flooded(watched, looks=50)
    assert watched.source.reset_peers == []


async def test_on_a_port_of_small_calls_nobody_may_send_much(watched: Watched) -> None:
    watched.connections.watch(PORT, 8, small=True)
    watched.source.received = {"admitted": 0, "quiet": 0}
    watched.connections.admit("admitted")
    for _ in range(4):
        watched.source.resident += 2 * RISE_BYTES
        watched.send("admitted")
        watched.look()
    assert watched.source.reset_peers == ["admitted"]


async def test_who_sent_impossible_headers_is_reset_at_once_and_so_are_strangers_that_send_then(
    watched: Watched,
) -> None:
    watched.source.received = {"accused": 0, "accomplice": 0, "idle": 0}
    watched.connections.accuse("accused")
    watched.look(0.0)
    assert watched.source.reset_peers == ["accused"]
    watched.send("accomplice")
    watched.look(ALARM_S / 2)
    assert watched.source.reset_peers == ["accused", "accomplice"]


async def test_with_scarce_memory_strangers_need_not_send(watched: Watched) -> None:
    watched.source.received = {"stranger": 0, "admitted": 0}
    watched.connections.admit("admitted")
    watched.source.scarce, watched.source.resident = True, 4 * watched.source.resident
    watched.look()
    assert watched.source.reset_peers == ["stranger"]


async def test_a_port_that_is_nearly_full_gets_rid_of_connections_without_a_call(watched: Watched) -> None:
    watched.source.received = {f"{i}": 0 for i in range(7)}
    watched.connections.admit("3")
    watched.connections.answer("5")  # a health watch
    watched.look(CENSUS_S)
    assert watched.source.reset_peers == []  # they may have just come
    watched.look(CENSUS_S)
    assert watched.source.reset_peers == ["0", "1", "2", "4", "6"]


async def test_at_a_small_port_the_longest_without_a_request_makes_room_for_newcomers(
    watched: Watched,
) -> None:
    watched.connections.watch(PORT, 3, small=True)
    watched.source.received = {"watches": 0, "idle": 0}
    open_call = watched.connections.request("watches")
    open_call.__enter__()
    watched.look(COUNT_S)
    watched.source.received |= {"asks": 0}
    watched.look(COUNT_S)
    assert watched.source.reset_peers == []
    watched.source.received |= {"newcomer": 0, "last": 0}
    with watched.connections.request("asks"):
        pass
    watched.connections._used["asks"] = watched.now  # by the test's clock
    watched.look(COUNT_S)
    assert watched.source.reset_peers == ["idle", "asks"]
    open_call.__exit__(None, None, None)
    watched.source.received |= {f"{i}": 0 for i in range(3)}
    watched.connections._used["watches"] = watched.now - 9
    watched.look(COUNT_S)
    assert set(watched.source.received) == {"0", "1", "2"}


async def test_memory_is_given_back_after_a_reset(watched: Watched) -> None:
    watched.connections.accuse("a")
    watched.source.received = {"a": 0}
    watched.look()
    assert watched.source.given_back == 0
    for number, after in enumerate(TRIMS_S, 1):
        watched.look(after)
        assert watched.source.given_back == number
    watched.look(2 * TRIMS_S[-1])
    assert watched.source.given_back == len(TRIMS_S)


async def test_memory_is_given_back_while_a_flood_goes_on(watched: Watched) -> None:
    for number in range(40):
        watched.source.received[f"{number}"] = 0
        watched.connections.accuse(f"{number}")
        watched.look(TRIMS_S[0] / 10)
    assert watched.source.given_back == 3


async def test_resets_are_logged_with_their_reason(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "service_kit")
    watched.source.received = {"stranger": 0}
    flooded(watched)
    [record] = caplog.records
    assert "strangers that send" in record.getMessage()
    assert record.__dict__["fields"]["connections"] == 1


async def test_the_thread_asks_the_event_loop_for_a_turn() -> None:
    connections = Connections(Source())
    connections.watch(PORT, 8)
    thread = threading.Thread(target=connections._ask_for_a_turn)
    thread.start()
    thread.join()
    await asyncio.sleep(0)
    assert connections._beat_at > 0


@pytest.mark.skipif(not sockets.AVAILABLE, reason="this system does not show a process its sockets")
def test_a_processs_connections_are_seen_with_what_they_received_and_can_be_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"x" * 1000)
                assert accepted.recv(1, socket.MSG_PEEK) == b"x"
                [one] = sockets.connections([port])
                host, number = client.getsockname()
                assert (one.port, one.peer) == (port, f"ipv4:{host}:{number}")
                assert (one.received, one.unread) == (1000, 1000)
                with socket.create_server(("127.0.0.1", 0)) as other:
                    assert sockets.connections([other.getsockname()[1]]) == []
                assert sockets.reset(one)
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
    assert not sockets.reset(one)
    assert sockets.resident_bytes() > MIB
    assert not sockets.scarce_memory(0.0)
    sockets.give_back_memory()
