# ruff: noqa: N802  RPC names are the proto's
"""Directories and entries that lead astray: real servers over loopback, as an attacker has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import paceline
import pytest
import trustme
from paceline import aio
from paceline.channel import Security
from paceline.directory import MAX_LEARNED
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.support.ports import kept_port
from tests.unit.client.ideal_scheduler import MODEL
from tests.unit.client.knowing_schedulers import TIMEOUT_S, Known, entry, listening, served

TOKEN = "a-token-of-many-bytes"
STREAMS = 24


class Endless(Known):
    """Its directory never ends: messages without anything, as fast as they are read."""

    async def WatchSchedulers(self, request: pb.WatchSchedulersRequest, context: Any) -> Any:
        self.looks += 1
        while True:
            yield pb.WatchSchedulersResponse()


async def learned(client: aio.Client, count: int) -> None:
    """Call until the client uses as many schedulers."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(client.addresses) != count:
            await client.complete("x", seed=3)


async def collected(client: aio.Client) -> list[list[tuple[int, ...]]]:
    """The token ids of streams with many affinity keys."""
    streams = [client.generate("x", seed=3, affinity_key=str(number)) for number in range(STREAMS)]
    return [[tuple(one.token_ids) for one in await stream.collect()] for stream in streams]


async def test_a_poisoned_entry_gets_no_byte_of_a_token(tmp_path: Path) -> None:
    authority, foreign = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    security = Security(ca_file=tmp_path / "ca.pem", token=TOKEN, server_name="localhost")
    given, honest, stranger, other_name, plain = (Known() for _ in range(5))
    async with (
        served(given, authority.issue_cert("localhost")) as address,
        served(honest, authority.issue_cert("localhost")) as good,
        served(stranger, foreign.issue_cert("localhost")) as of_stranger,
        served(other_name, authority.issue_cert("attacker.test")) as of_other_name,
        served(plain) as of_plain,
        listening() as (bare, received),
        aio.Client(address, security=security) as client,
    ):
        given.others = [
            *(entry(one, tls_name="localhost") for one in (good, of_stranger, of_other_name, of_plain, bare)),
            entry("localhost:" + of_plain.rsplit(":", 1)[1]),  # would be sent in the clear
        ]
        await learned(client, 6)
        outputs = await collected(client)
        assert outputs == [outputs[0]] * STREAMS
        (tmp_path / "ca.pem").unlink()  # nothing is read in a call
        assert await collected(client) == outputs
        assert set(given.callers) == set(honest.callers) == {f"Bearer {TOKEN}"}
        assert not stranger.callers
        assert not other_name.callers
        assert not plain.callers
        assert received[0] == 0x16  # a TLS handshake, which nobody answers
        assert TOKEN.encode() not in received


@pytest.mark.parametrize("unary", [False, True])
async def test_an_entry_that_lies_about_its_model_serves_nobody(unary: bool) -> None:
    given, liar = Known(), Known(model=b"another model")
    async with served(given) as address, served(liar) as of_liar, aio.Client(address) as client:
        given.others = [entry(of_liar)]
        client._schedulers._look.start(client._schedulers._learn)
        await client._schedulers._look.wait(TIMEOUT_S)
        assert list(client.addresses) == [address, of_liar]
        for number in range(STREAMS):
            options: Any = {"seed": 3, "affinity_key": str(number)}
            if unary:
                assert (await client.complete("x", **options)).token_ids
            else:
                assert await client.generate("x", **options).collect()
        assert list(client.addresses) == [address]
        assert len(liar.callers) == 1
        assert not [one for one in liar.requests if one.HasField("continuation")]


async def test_a_client_that_reads_a_long_stream_looks_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.directory.LOOK_EVERY_S", 0.0)
    fake = Known()
    async with served(fake) as address, aio.Client(address) as client:
        messages = 0
        async for _ in client.generate("x", seed=3):
            await client._schedulers._look.wait(TIMEOUT_S)
            messages += 1
        assert fake.looks > 1 < messages


async def test_thousands_of_entries_loops_dead_ones_and_its_own_address_twice_harm_nobody() -> None:
    given, other = Known(), Known()
    async with served(given) as address, served(other) as second, aio.Client(address) as client:
        own = [entry(address, instance="of own:1"), entry(address, instance="another")]
        dead = [entry(f"127.0.0.1:{kept_port()}"), *(entry(f"127.0.0.{n}:1") for n in range(2, 22))]
        loop = entry(second)
        given.others = [*own, *dead, loop]
        other.others = [entry(address), entry(second, instance="of own:1")]
        await learned(client, 1 + len(dead) + 1)
        outputs = await collected(client)
        assert outputs == [outputs[0]] * STREAMS
        assert address in client.addresses
        assert len(set(client.addresses)) == len(client.addresses)
    async with served(given) as address, aio.Client(address) as client:
        given.others = [entry(f"127.0.{number // 200}.{2 + number % 200}:1") for number in range(2_000)]
        await learned(client, 1 + MAX_LEARNED)
        assert [await client.generate("x", seed=3).collect()]


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_directory_that_never_ends_takes_no_call_along_and_ends_itself(blocking: bool) -> None:
    fake = Endless()

    def call(address: str) -> int:
        with paceline.Client(address) as client:
            assert client.generate("x", seed=3).collect()
            client._schedulers._look.wait(TIMEOUT_S)
            return len(client.addresses)

    async with served(fake) as address:
        if blocking:
            assert await asyncio.to_thread(call, address) == 1
        else:
            async with aio.Client(address) as client:
                assert await client.generate("x", seed=3).collect()
                await client._schedulers._look.wait(TIMEOUT_S)
                assert list(client.addresses) == [address]
    assert fake.looks == 1


async def test_what_asks_all_schedulers_asks_those_of_the_directory_too() -> None:
    given, other = Known(), Known(live={"there"})
    async with served(given) as address, served(other) as second, aio.Client(address) as client:
        given.others = [entry(second)]
        assert (await client.abort(["there"], timeout_s=TIMEOUT_S)).aborted == ("there",)


async def test_a_call_to_one_that_was_just_given_up_goes_elsewhere_and_does_not_hang() -> None:
    """Between the moment at which a scheduler is known no more, and that at which calls hear of it."""
    async with (
        served(Known()) as learned,
        served(Known(others=[entry(learned)])) as given,
        aio.Client(given) as client,
    ):
        await client.abort(["nobody"])  # looks into the directory before
        assert client.addresses == (given, learned)
        schedulers = client._schedulers  # the moment takes microseconds otherwise
        attempts = schedulers.attempts("generate", None, 9.0)
        attempts.answered(b"a model that only the learned one has")
        attempts.address = learned
        schedulers._rotation.use([given, learned], {}, (), {}, {given: MODEL, learned: attempts._begun_with})
        schedulers._known.distrust(learned)
        assert schedulers._begin(attempts).address == given
