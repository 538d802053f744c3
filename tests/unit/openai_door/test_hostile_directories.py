# ruff: noqa: N802  RPC names are the proto's
"""A gateway whose scheduler lists an attacker's entries: what HTTP callers get, and what he gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trustme
from google.rpc import code_pb2
from paceline.affinity import affinity_key, preference
from paceline.channel import Security
from paceline.directory import MAX_ENTRIES, MAX_LEARNED
from paceline.failover import TRIED_BEFORE_GIVEN
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline_openai.beginnings import EXTRA_STREAMS

from tests.support.openai_door import Answer, Door, serving_door
from tests.support.ports import kept_port
from tests.unit.client.ideal_scheduler import MODEL, ids_of
from tests.unit.client.knowing_schedulers import TIMEOUT_S, Known, entry, listening, served
from tests.unit.client.test_several_schedulers import broken, status

REQUESTS, FEW, SEED, MAX_TOKENS = 24, 6, 3, 10
RIGHT = ids_of(SEED, 0, MAX_TOKENS)


class Elsewhere(Known):
    """Serves another model than its entry says, with other tokens, and calls everybody an administrator."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for message in super().Generate(request, context):
            if message.HasField("delta"):
                message.delta.token_ids[:] = [1000 + one for one in message.delta.token_ids]
            yield message

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        told = await super().GetModelInfo(request, context)
        told.caller.CopyFrom(pb.Caller(name="root", admin=True))
        return told


@dataclass
class Holding(Known):
    """Its streams begin, and end when they may."""

    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for message in super().Generate(request, context):
            yield message
            if message.HasField("started"):
                self.begun.release()
                await self.may_end.wait()


class Silent(Known):
    """Takes calls, and answers none that asks for the model."""

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        await super().GetModelInfo(request, context)
        await asyncio.Event().wait()
        raise AssertionError


def key_of(number: int) -> str:
    return f"the-key-of-caller-{number}"


async def asked(door: Door, number: int, **fields: Any) -> Answer:
    """A caller's completion. Its prompt is his own, so that prompts go to many schedulers."""
    body = {"prompt": f"prompt {number}", "seed": SEED, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    return await door.ask("/v1/completions", body | fields, key=key_of(number))


def tokens_of(answer: Answer) -> list[list[int]]:
    """Of each choice."""
    assert answer.status == 200, answer.body
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    found: dict[int, list[int]] = {}
    for part in answer.events if is_stream else [answer.json]:
        for choice in part["choices"]:
            found.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    return [found[index] for index in sorted(found)]


async def right_for_all(door: Door, callers: int = REQUESTS) -> None:
    """Callers ask, one after the other, each for an answer and for a stream, and get the right tokens."""
    for number in range(callers):
        assert tokens_of(await asked(door, number)) == [RIGHT]
        assert tokens_of(await asked(door, number, stream=True)) == [RIGHT]


async def learned(door: Door) -> int:
    """Look into the directory, before anybody asks; how many schedulers the gateway uses then."""
    schedulers = door.app._client._schedulers
    schedulers._look.start(schedulers._learn)
    await schedulers._look.wait(TIMEOUT_S)
    return len(schedulers.addresses)


def channels(door: Door) -> set[str]:
    """Addresses that were called."""
    return set(door.app._client._schedulers.endpoints)


async def test_no_byte_of_a_callers_key_goes_to_one_that_the_gateways_authority_has_not_signed(
    tmp_path: Path,
) -> None:
    authority, foreign = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    given, honest, stranger, other_name, plain = (Known() for _ in range(5))
    async with (
        served(given, authority.issue_cert("127.0.0.1")) as address,
        served(honest, authority.issue_cert("stack.test")) as good,
        served(stranger, foreign.issue_cert("stack.test")) as of_stranger,
        served(other_name, authority.issue_cert("attacker.test")) as of_other_name,
        served(plain) as of_plain,
        listening() as (bare, received),
        serving_door(address, security=Security(ca_file=tmp_path / "ca.pem")) as door,
    ):
        poisoned = of_stranger, of_other_name, of_plain, bare
        in_the_clear = "localhost:" + of_plain.rsplit(":", 1)[1]
        given.others = [
            *(entry(one, tls_name="stack.test") for one in (good, *poisoned)),
            entry(in_the_clear),
        ]
        assert await learned(door) == 6
        await right_for_all(door)
        assert channels(door) == {address, good, *poisoned}
    assert {*given.callers, *honest.callers} == {f"Bearer {key_of(one)}" for one in range(REQUESTS)}
    assert not [*stranger.callers, *other_name.callers, *plain.callers]
    assert received[0] == 0x16  # a TLS handshake, which nobody answers
    assert b"the-key-of" not in received


async def test_a_gateway_without_an_authority_calls_nobody_beyond_loopback_or_by_tls() -> None:
    given, honest = Known(), Known()
    async with (
        served(given) as address,
        served(honest) as good,
        listening() as (bare, received),
        serving_door(address) as door,
    ):
        port = bare.rsplit(":", 1)[1]
        spellings = f"0.0.0.0:{port}", f"127.1:{port}", f"localhost.:{port}", f"ipv4:{bare}", f"dns:///{bare}"
        given.others = [entry(good), entry(bare, tls_name="localhost"), *map(entry, spellings)]
        assert await learned(door) == 2
        await right_for_all(door)
        assert channels(door) == {address, good}
        ending, own = await asyncio.open_connection("0.0.0.0", int(port))  # one that calls it reaches it
        own.write(b"the test's own")
        assert await ending.read() == b""
        own.close()
    assert received == b"the test's own"


@pytest.mark.parametrize("stream", [False, True])
async def test_no_answer_goes_on_with_tokens_of_an_entry_that_lies_about_its_model(stream: bool) -> None:
    given, liar = Known(), Elsewhere(model=b"another model")
    async with served(given) as address, served(liar) as of_liar, serving_door(address) as door:
        given.others = [entry(of_liar)]
        assert await learned(door) == 2
        lost = next(number for number in count() if _first(number, address, of_liar) == address)
        given.script = [(3, broken)]  # what it began goes on elsewhere: at the liar, as there is nobody else
        assert tokens_of(await asked(door, lost, stream=stream)) == [RIGHT]
        assert [one.HasField("continuation") for one in liar.requests] == [True]
        await right_for_all(door)
        assert len(liar.requests) == 1


async def test_nobody_is_an_administrator_by_the_word_of_an_entry_that_lies_about_its_model() -> None:
    given, liar = Known(), Elsewhere(model=b"another model")
    async with served(given) as address, served(liar) as of_liar, serving_door(address) as door:
        given.others = [entry(of_liar)]
        assert await learned(door) == 2
        answers = [await door.ask("/metrics", key=key_of(number)) for number in range(REQUESTS)]
        assert {answer.status for answer in answers} == {403}
        assert liar.callers
        assert door.app._client.addresses == (address,)


async def test_an_entry_that_lies_about_its_load_has_no_more_than_its_share_of_the_streams() -> None:
    begun = asyncio.Semaphore(0)
    given, honest, liar = (Holding(load=load, begun=begun) for load in (400, 400, 0))
    async with (
        served(given) as address,
        served(honest) as good,
        served(liar) as of_liar,
        serving_door(address) as door,
    ):
        given.others = [entry(good, load=400), entry(of_liar, load=0)]
        assert await learned(door) == 3
        asking = [asyncio.create_task(asked(door, number, stream=True)) for number in range(REQUESTS)]
        async with asyncio.timeout(TIMEOUT_S):
            for _ in asking:
                await begun.acquire()
        assert len(liar.requests) <= -(-5 * REQUESTS // (4 * 3)) + EXTRA_STREAMS
        for one in (given, honest, liar):
            one.may_end.set()
        assert [tokens_of(answer) for answer in await asyncio.gather(*asking)] == [[RIGHT]] * REQUESTS


async def test_ten_thousand_dead_entries_cost_a_bounded_part() -> None:
    given = Known()
    async with served(given) as address, serving_door(address) as door:
        given.others = [entry(f"127.{number // 200}.0.{2 + number % 200}:1") for number in range(MAX_ENTRIES)]
        assert await learned(door) == 1 + MAX_LEARNED
        await right_for_all(door, FEW)
        for number in range(FEW):
            turns = [{"role": "system", "content": 600 * "s"}, {"role": "user", "content": str(number)}]
            fields = {"messages": turns, "seed": SEED, "max_tokens": MAX_TOKENS, "return_token_ids": True}
            answer = await door.ask("/v1/chat/completions", fields, key=key_of(number))
            assert tokens_of(answer) == [RIGHT]
        assert len(door.app._client.addresses) == 1 + MAX_LEARNED
        calls = 3 * FEW * 2  # each request asks who its caller is, too
        assert 1 < len(channels(door)) <= 1 + calls * TRIED_BEFORE_GIVEN


async def test_dead_entries_loops_and_its_own_address_twice_harm_no_caller() -> None:
    given, other = Known(), Known()
    async with served(given) as address, served(other) as second, serving_door(address) as door:
        elsewhere = {one: "localhost:" + one.rsplit(":", 1)[1] for one in (address, second)}
        dead = f"127.0.0.1:{kept_port()}"
        given.others = [
            *(entry(one, instance="of own:1") for one in (address, elsewhere[address])),
            entry(address, instance="another"),
            *(entry(one, instance="of the other") for one in (second, elsewhere[second])),
            entry(dead),
        ]
        other.others = [entry(address), entry(second), entry(dead)]
        assert await learned(door) == 3
        await right_for_all(door)
        assert channels(door) == {*door.app._client.addresses} == {address, second, dead}
        assert {*given.callers, *other.callers} == {f"Bearer {key_of(one)}" for one in range(REQUESTS)}


@pytest.mark.parametrize("stream", [False, True])
async def test_no_answer_is_of_two_models_and_each_names_the_one_that_gave_it(stream: bool) -> None:
    """An entry may have another model of the same name, and say so: calls that nobody else takes go there."""
    given, other = Known(), Elsewhere(model=b"another model")
    async with served(given) as address, served(other) as second, serving_door(address) as door:
        given.others = [entry(second, model_fingerprint=other.model)]
        assert await learned(door) == 2
        assert b'"system_fingerprint": "fp_%b"' % MODEL.hex()[:16].encode() in (await asked(door, 0)).body
        given.script = [(0, status(code_pb2.UNAVAILABLE, "SHUTTING_DOWN"))]  # of one prompt, not of the other
        both = await asked(door, 0, prompt=["one", "two"], stream=stream)
        assert b"prompts went to different models" in both.body
        assert both.status == (200 if stream else 503)
        given.script = [(0, status(code_pb2.UNAVAILABLE, "SHUTTING_DOWN"))]
        alone = await asked(door, 0, stream=stream)
        assert tokens_of(alone) == [[1000 + one for one in RIGHT]]
        assert b'"system_fingerprint": "fp_%b"' % other.model.hex()[:16].encode() in alone.body


async def test_an_entry_that_answers_nothing_keeps_no_key_from_being_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline_openai.callers._PATIENCE_S", 0.1)
    given, silent = Known(), Silent()
    async with served(given) as address, served(silent) as of_silent, serving_door(address) as door:
        given.others = [entry(of_silent)]
        assert await learned(door) == 2
        for number in range(4):
            assert (await door.ask("/metrics", key=key_of(number))).status == 403
        assert silent.callers


def _first(number: int, *addresses: str) -> str:
    """The scheduler that a caller's prompt prefers."""
    return preference(affinity_key(pb.GenerateRequest(text=f"prompt {number}")), addresses)[0]
