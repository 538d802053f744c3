"""Executors are killed while objects are open, and streams have the ids, text and logprobs of plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.types import Drafter, Speculation

from tests.grammars.questions import QUESTIONS
from tests.model.default_model import default_model
from tests.support.held_streams import essence
from tests.support.mid_object import RESTART_S, kill_amid
from tests.support.stack import Stack, oracle_stack

KILLS, MAX_ROUNDS = 20, 25
ASKED = QUESTIONS[:7]
MAX_TOKENS = 120  # on the oracle, whose tokens are bytes, an object takes about a hundred
OBJECTS = [place for place, question in enumerate(ASKED) if question.is_object]
DRAFTING = ("off", "auto", Speculation(3, Drafter.NGRAM), Speculation(4, Drafter.GRAMMAR))


@pytest.fixture(
    params=[
        pytest.param("oracle", marks=pytest.mark.slow),
        pytest.param("model", marks=[pytest.mark.slow, pytest.mark.model]),
    ]
)
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    flags = ["--step-ms", "8"]
    if request.param == "model":
        flags = ["--backend", "torch", "--model", str(default_model()), "--dtype", "int8", "--pages", "512"]
    patient = ["--failover-timeout-s", str(RESTART_S)]
    with oracle_stack(tmp_path, executor=flags, scheduler=patient) as stack:
        yield stack


async def test_each_of_20_kills_amid_an_object_changes_nothing(stack: Stack) -> None:
    (address,) = stack.addresses
    depths: list[list[int]] = []
    async with stack.client() as client:
        expected = [
            [
                essence(one)
                for one in await question.ask(client, max_tokens=MAX_TOKENS, speculation="off").collect()
            ]
            for question in ASKED
        ]
        for number in range(MAX_ROUNDS):
            if len(depths) == KILLS:
                break
            target = OBJECTS[number % len(OBJECTS)]
            tokens = sum(len(one.token_ids) for one in expected[target])
            streams = []
            for place, question in enumerate(ASKED):
                drafting = DRAFTING[(number + place) % len(DRAFTING)]
                streams.append((question, question.ask(client, max_tokens=MAX_TOKENS, speculation=drafting)))
            after = 1 + tokens * (7 * number % KILLS) // (KILLS + 4)
            kill = await kill_amid(stack, address, client, streams, target, after)
            assert [[essence(one) for one in answer] for answer in kill.answers] == expected
            if kill.tokens:
                depths.append(sorted(kill.tokens))
        assert (await client.status()).failed == 0
    print(f"\n{len(depths)} kills amid objects, of which clients had so many tokens: {depths}")
    assert len(depths) == KILLS
    await stack.all_pages_back(address)
