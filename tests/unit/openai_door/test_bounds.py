"""What strangers may cost: the server's and the body's bounds, with real connections and no scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from paceline_openai import Bounds
from paceline_openai.budget import BodyBudget
from paceline_openai.json_body import MAX_VALUES, read_object
from paceline_openai.refusals import Refusal

from tests.support.openai_door import Door, serving_door

TIGHT = Bounds(
    max_body_bytes=5000,
    max_bodies_bytes=8000,
    max_header_bytes=2000,
    max_headers=20,
    max_connections=4,
    header_timeout_s=0.3,
    body_timeout_s=0.3,
)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with serving_door("127.0.0.1:9", bounds=TIGHT, failover_timeout_s=0.2, local=True) as door:
        yield door


async def test_a_head_has_bounded_size_and_number_of_headers(door: Door) -> None:
    many = b"".join(b"x%d: 1\r\n" % number for number in range(21))
    for head in (b"x: " + b"y" * 2000 + b"\r\n", many):
        answer = await door.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n")
        assert answer.status == 431
    assert (await door.raw(b"GET /" + b"y" * 3000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")).status == 431


@pytest.mark.parametrize("sent", [b"", b"GET /liveness HTTP/1.1\r\nhost: local"])
async def test_a_head_that_does_not_come_is_not_waited_for(door: Door, sent: bytes) -> None:
    answer = await door.raw(sent)
    assert answer.status == 408


async def test_what_is_no_http_is_refused(door: Door) -> None:
    for sent in (b"\x16\x03\x01hello\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n"):
        assert (await door.raw(sent)).status == 400


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: %s\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (CHUNKED % b"gzip", 400),
        (CHUNKED % b"chunked" + b"zz\r\n", 400),
        (CHUNKED % b"chunked" + b"1\r\n \r\n" * 17_000, 413),
        (CHUNKED % b"chunked" + b"0\r\n" + b"x: 1\r\n" * 21, 431),
    ],
    ids=["coding", "chunk", "chunks", "trailers"],
)
async def test_a_body_that_breaks_http_or_a_bound_is_answered(door: Door, sent: bytes, status: int) -> None:
    assert (await door.raw(sent)).status == status


async def test_an_offer_of_another_protocol_changes_nothing(door: Door) -> None:
    offer = b"host: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: %s\r\n"
    get = b"GET /liveness HTTP/1.1\r\n" + offer % b"websocket"
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write((get + b"\r\n") * 2)
    async with asyncio.timeout(30):
        for _ in range(2):
            assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200")
    writer.close()
    post = b"POST /v1/models HTTP/1.1\r\n" + offer % b"h2c"
    smuggled = b"GET /liveness HTTP/1.1\r\n\r\n"
    for framing, body in (
        (b"content-length: %d\r\n\r\n" % len(smuggled), smuggled),
        (b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(smuggled), smuggled)),
    ):
        for behind in (b"", b"GET /liveness HTTP/1.1\r\n\r\n"):  # the answer ends the connection
            answer = await door.raw(post + framing + body + behind)
            assert (answer.status, answer.body.count(b"HTTP/1.1")) == (405, 0)


async def test_a_flood_of_pipelined_requests_ends_the_connection(door: Door) -> None:
    one = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(one * 1000)
    async with asyncio.timeout(30):
        try:
            received = await reader.read()
        except ConnectionResetError:
            received = b""
    writer.close()
    assert received.count(b"HTTP/1.1 200") == 0
    assert (await door.ask("/liveness")).status == 200


async def test_connections_above_the_bound_are_closed_at_once(door: Door) -> None:
    held = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(4)]
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    async with asyncio.timeout(10):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    for _, one in (*held, (reader, writer)):
        one.close()


async def test_a_page_by_another_name_and_a_page_of_another_origin_are_refused(door: Door) -> None:
    local = b"host: localhost\r\norigin: "
    for headers in (
        b"host: evil.example\r\n",
        local + b"http://evil.example\r\n",
        local + b"null\r\n",
        local + b"http://[\r\n",
    ):
        answer = await door.raw(b"GET /liveness HTTP/1.1\r\n" + headers + b"\r\n")
        assert (answer.status, answer.error["code"]) == (403, "permission_denied")


async def test_without_a_scheduler_requests_are_refused_with_a_time_to_wait(door: Door) -> None:
    answer = await door.ask("/v1/models")
    assert (answer.status, answer.error["type"]) == (503, "server_error")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await door.ask("/health")).status == 503


@pytest.mark.parametrize(
    "body",
    [
        b"{" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 65 + b"]" * 65,
        b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'"\xff"',
        b"[]",
        b"",
        b"{}{}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": [' + b"1," * MAX_VALUES + b"1]}",
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_a_body_that_is_no_plain_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        read_object(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")
    assert len(refused.value.message) < 300


def test_a_body_of_the_deepest_kind_is_read() -> None:
    deep = b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}"
    assert read_object(deep) == json.loads(deep)


def test_bodies_have_a_budget_in_all_and_for_each_caller() -> None:
    budget = BodyBudget(most=60, total=100)
    with budget.holding(b"a", 50), pytest.raises(Refusal) as refused, budget.holding(b"a", 20):
        pass
    assert (refused.value.status, refused.value.close) == (429, True)
    with budget.holding(b"a", 50) as one, budget.holding(b"b", 45):
        with pytest.raises(Refusal):
            one.grow(56)
        with pytest.raises(Refusal), budget.holding(b"c", 10):
            pass
    assert budget.held_bytes == 0
    with pytest.raises(Refusal) as refused, budget.holding(b"a", 61):
        pass
    assert refused.value.status == 413
    assert budget.held_bytes == 0
