"""Tests of a program that calls a model, without a model.

    pip install -c constraints.txt ".[testing]"   # in a clone of Paceline
    pytest examples/test_own_program.py

`summary` stands for a program of your own. It asks a scheduler for a summary, waits once if that is full, and
gives up when the user does. The fixtures are those of Paceline's pytest plugin.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing

import pytest
from paceline import Client, Delta, errors
from paceline.testing import FakeError, FakeLoss, FakeReply, FakeScheduler, FakeStall, LiveConfig, LiveService


def summary(client: Client, text: str) -> Generator[str, None, None]:
    """The pieces of a summary, as they come."""
    request = [{"role": "user", "content": f"Summarize in one sentence: {text}"}]
    try:
        yield from _pieces(client, request)
    except errors.QueueFull as full:
        time.sleep(full.retry_after_s or 1.0)
        yield from _pieces(client, request)


def _pieces(client: Client, messages: list[dict[str, str]]) -> Iterator[str]:
    with client.generate(messages=messages, max_tokens=100, temperature=0.0) as stream:
        for event in stream:
            if isinstance(event, Delta):
                yield event.text


@pytest.fixture
def client(paceline_fake: FakeScheduler) -> Iterator[Client]:
    """A client of the fake scheduler."""
    with paceline_fake.client() as client:
        yield client


def test_it_asks_for_one_sentence_and_gives_the_pieces_as_they_come(
    client: Client, paceline_fake: FakeScheduler
) -> None:
    """What the program asks, and what it makes of the answer."""
    paceline_fake.reply("It rains.", to="^Summarize in one sentence: ")
    assert list(summary(client, "Rain, again.")) == ["It", " rains."]
    (call,) = paceline_fake.calls
    assert call.request.stop.max_tokens == 100


def test_it_waits_as_long_as_it_is_told_and_asks_again(client: Client, paceline_fake: FakeScheduler) -> None:
    """An error with a retry time, once."""
    paceline_fake.reply(FakeError("QUEUE_FULL", retry_after_s=0.01), times=1)
    paceline_fake.reply("It rains.")
    assert "".join(summary(client, "Rain.")) == "It rains."


def test_a_lost_connection_leaves_no_gap(client: Client, paceline_fake: FakeScheduler) -> None:
    """The SDK continues the stream."""
    paceline_fake.reply(FakeReply("It rains again.", fault=FakeLoss(after=2)))
    assert "".join(summary(client, "Rain.")) == "It rains again."


def test_a_user_who_leaves_ends_the_request(client: Client, paceline_fake: FakeScheduler) -> None:
    """Nothing is computed for nobody."""
    paceline_fake.reply(FakeReply("It rains", fault=FakeStall(after=1)))
    with closing(summary(client, "Rain.")) as pieces:
        assert next(pieces) == "It"
    assert paceline_fake.calls[0].wait() == "left"


@pytest.fixture(scope="module")
def paceline_module_config() -> LiveConfig:
    """What the live service of this module says."""
    return LiveConfig(script=[{"message": "Summarize in one sentence: Rain.", "text": "It rains."}])


def test_it_works_with_a_real_service(paceline_module_service: LiveService) -> None:
    """Both processes, the real protocol, and an answer that is known."""
    with paceline_module_service.client() as client:
        assert "".join(summary(client, "Rain.")) == "It rains."
