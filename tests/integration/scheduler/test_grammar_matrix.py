"""Grammars beside everything else, in all pairs: each request among the others is what it is alone, plain."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from paceline import aio, types
from paceline.types import Drafter, Speculation

from tests.grammars.pairs import all_pairs
from tests.model.default_model import default_model
from tests.support.stack import Stack, eventually, oracle_stack

pytestmark = pytest.mark.long

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["one", "two"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}], "triggers": ["<f"]}
GRAMMARS: dict[str, dict[str, Any]] = {
    "none": {},
    "schema": {"schema": SCHEMA},
    "regex": {"regex": "([a-c]{2,9}-){2}[0-9]+"},
    "choices": {"choices": ["yes", "no", "yes, but"]},
    "lark": {"grammar": 'start: "<" start ">" | /[xy]{1,4}/'},
    "tag": {"structural_tag": json.dumps(TAG)},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "off": {"speculation": "off"},
    "auto": {"speculation": "auto"},
    "n-gram": {"speculation": Speculation(3, Drafter.NGRAM)},
    "draft executor": {"speculation": Speculation(3, Drafter.DRAFT_EXECUTOR)},
    "grammar": {"speculation": Speculation(4, Drafter.GRAMMAR)},
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "bias": {"temperature": 1.0, "logit_bias": {97: 5.0, 98: -100.0, 34: 3.0, 60: 2.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 8},
}
NUMBERS: dict[str, dict[str, Any]] = {"1": {}, "3": {"n": 3}}
LOGPROBS: dict[str, dict[str, Any]] = {"none": {}, "0": {"logprobs": 0}, "3": {"logprobs": 3}}
STOPS: dict[str, dict[str, Any]] = {"none": {}, "texts": {"stop": ["b", "one", "5"]}}
OPTIONS = {
    "grammar": GRAMMARS,
    "drafter": DRAFTERS,
    "sampling": SAMPLINGS,
    "n": NUMBERS,
    "logprobs": LOGPROBS,
    "stops": STOPS,
}
ROWS = all_pairs({name: list(values) for name, values in OPTIONS.items()})


def test_every_pair_is_among_the_rows() -> None:
    assert len(ROWS) < 60
    for a, b in itertools.combinations(OPTIONS, 2):
        pairs = {(row[a], row[b]) for row in ROWS}
        assert pairs == set(itertools.product(OPTIONS[a], OPTIONS[b]))


@pytest.fixture(
    params=[
        "oracle",
        pytest.param("model", marks=[pytest.mark.slow, pytest.mark.model]),
    ]
)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags: list[str] = []
    if request.param == "model":
        flags = ["--backend", "torch", "--model", str(default_model()), "--dtype", "int8", "--pages", "4096"]
    draft = ["--draft-agreement", "0.8"] if request.param == "oracle" else flags
    with oracle_stack(tmp_path_factory.mktemp("stack"), executor=flags, draft=draft) as stack:
        yield stack


async def ask(client: aio.Client, seed: int, row: dict[str, str], **other: Any) -> list[types.Completion]:
    options: dict[str, Any] = {}
    for name, value in row.items():
        options |= OPTIONS[name][value]
    return await client.completions(f"Number {seed % 3} of", seed=seed, max_tokens=40, **options | other)


def seen(completions: list[types.Completion]) -> list[tuple[object, ...]]:
    """What does not depend on time and neighbours."""
    found: list[tuple[object, ...]] = []
    for one in completions:
        assert one.finished is not None
        end = one.finished.reason, one.finished.eos_token_id, one.finished.stop_string
        found.append((one.text, end, one.token_ids, one.logprobs, one.finished.usage.completion_tokens))
    return found


async def has_drafter(client: aio.Client) -> bool:
    return any(one.draft and one.connected for one in await client.executors())


async def test_each_request_among_the_others_is_what_it_is_alone_and_plain(stack: Stack) -> None:
    async with stack.client() as client:
        await eventually(lambda: has_drafter(client), "the draft executor is not taken")
        alone = [seen(await ask(client, i, row, speculation="off")) for i, row in enumerate(ROWS)]
        together = await asyncio.gather(*(ask(client, i, row) for i, row in enumerate(ROWS)))
        for i, row in enumerate(ROWS):  # among many requests, drafts of the executor may come too late
            if row["drafter"] == "draft executor":
                assert seen(together[i]) == alone[i], row
                together[i] = await ask(client, i, row)
    drafted: dict[str, int] = {}
    for row, expected, found in zip(ROWS, alone, together, strict=True):
        assert seen(found) == expected, row
        for one in found:
            assert one.finished is not None
            drafted[row["drafter"]] = drafted.get(row["drafter"], 0) + one.finished.usage.drafted_tokens
    assert not drafted.pop("off")
    drafted.pop("auto")  # which may find that drafts do not pay, by times that it measures
    assert all(drafted.values()), drafted
