"""Where a client's caller names nothing, the environment does."""

from __future__ import annotations

import asyncio

import paceline
import pytest
from paceline import aio
from paceline.channel import SCHEDULER_ADDRESS

from tests.unit.client.conftest import Served

VARIABLES = ("PACELINE_ADDRESS", "PACELINE_TOKEN", "PACELINE_TLS_CA", "PACELINE_TLS_CERT", "PACELINE_TLS_KEY")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


async def test_address_and_token_come_from_the_environment(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_ADDRESS", served.address)
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    async with aio.Client() as client:
        assert await client.generate("words").text() == "a b c"
    assert served.fake.metadata["authorization"] == "Bearer secret"

    def blocking() -> str:
        with paceline.Client() as client:
            return client.generate("words").text()

    served.fake.metadata = {}
    assert await asyncio.to_thread(blocking) == "a b c"
    assert served.fake.metadata["authorization"] == "Bearer secret"


async def test_what_the_caller_names_counts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    async with aio.Client(served.address, security=paceline.Security()) as client:
        assert await client.generate("words").text() == "a b c"
    assert "authorization" not in served.fake.metadata


def test_several_addresses_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    with paceline.Client() as client:
        assert client.addresses == (SCHEDULER_ADDRESS,)
    monkeypatch.setenv("PACELINE_ADDRESS", "a:1,b:2")
    with paceline.Client() as client:
        assert client.addresses == ("a:1", "b:2")


def test_variables_that_do_not_go_together_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TLS_CERT", "cert.pem")
    with pytest.raises(ValueError, match=r"PACELINE_TLS_CERT.*cert_file and key_file go together"):
        paceline.Client()
