"""The timeline's page below /timeline/: the caller's own requests, and all of them for administrators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from paceline import Security, aio, timeline_page
from paceline.cli.token import entry

from tests.support.openai_door import Door, serving_door
from tests.support.stack import Stack, oracle_stack

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Stack, Door]]:
    tokens = tmp_path / "tokens.yaml"
    people = (entry("boss", "boss", admin=True), entry("alice", "alice"), entry("bob", "bob"))
    tokens.write_text("\n".join((*people, "")))
    with oracle_stack(tmp_path, scheduler=("--tokens-file", str(tokens))) as stack:
        async with serving_door(stack.scheduler.address) as door:
            yield stack, door


async def complete(door: Door, key: str, request_id: str) -> str:
    """Returns the id of the answer."""
    answer = await door.ask("/v1/completions", {"model": "", "prompt": "words", "max_tokens": 4}, key=key,
                            x_request_id=request_id)  # fmt: skip
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


def names(answer: dict[str, object]) -> set[tuple[str, str]]:
    parts: list[dict[str, list[list[str]]]] = answer["parts"]  # type: ignore[assignment]
    return {(one.split("-")[-1], identity) for part in parts for _, one, identity in part["names"]}


async def test_a_key_shows_its_own_requests_and_an_administrators_all(served: tuple[Stack, Door]) -> None:
    _, door = served
    given = await complete(door, "alice", "a1")
    await complete(door, "bob", "b1")
    seen = {
        key: (await door.ask("/timeline/steps?after=0", key=key)).json for key in ("alice", "bob", "boss")
    }
    assert (names(seen["alice"]), names(seen["bob"])) == ({("a1", "")}, {("b1", "")})
    assert names(seen["boss"]) == {("a1", "alice"), ("b1", "bob")}
    for key in ("", "wrong"):
        for path in ("about", "steps?after=0", "why?id=a1"):
            assert (await door.ask(f"/timeline/{path}", key=key)).status == 401

    async def why(key: str, **asked: str) -> str:
        text: str = (await door.ask(f"/timeline/why?{urlencode(asked)}", key=key)).json["text"]
        return text

    assert "Ended" in await why("alice", id=given)
    assert "Ended" in await why("boss", id=given, identity="alice")
    assert "no more" in await why("bob", id=given)
    assert "no administrator" in await why("bob", id=given, identity="alice")
    assert "alert" not in await why("alice", id=HOSTILE)


async def test_steps_go_on_where_the_last_answer_ended_and_begin_anew_after_a_restart(
    served: tuple[Stack, Door],
) -> None:
    _, door = served
    await complete(door, "alice", "first")
    seen = (await door.ask("/timeline/steps?after=0", key="boss")).json
    last = seen["parts"][-1]
    assert seen["next"] == last["first_step"] + len(last["started_us"])
    assert (await door.ask(f"/timeline/steps?after={seen['next']}", key="boss")).json["parts"] == []
    await complete(door, "alice", "second")
    more = (await door.ask(f"/timeline/steps?after={seen['next']}", key="boss")).json
    assert names(more) == {("second", "alice")}
    assert more["parts"][0]["first_step"] == seen["next"]
    ahead = (await door.ask(f"/timeline/steps?after={more['next'] + 10}", key="boss")).json
    assert (ahead["next"], ahead["parts"], ahead["error"]) == (0, [], "")


async def test_of_several_schedulers_the_page_chooses_one(served: tuple[Stack, Door], tmp_path: Path) -> None:
    first, _ = served
    (tmp_path / "second").mkdir()
    options = ("--tokens-file", str(tmp_path / "tokens.yaml"))
    with oracle_stack(tmp_path / "second", scheduler=options) as second:
        addresses = [one.scheduler.address for one in (first, second)]
        async with serving_door(*addresses) as both, serving_door(addresses[1]) as one:
            await complete(one, "alice", "there")
            about = {key: (await both.ask("/timeline/about", key=key)).json for key in ("alice", "boss")}
            values, shown = zip(*about["boss"]["choices"], strict=True)
            assert (about["boss"]["source"], list(shown)) == (addresses[0], addresses)
            assert about["alice"]["choices"] == [[values[0], "scheduler 1"], [values[1], "scheduler 2"]]

            async with serving_door(*addresses) as third:  # an address can't be guessed by its value
                others = (await third.ask("/timeline/about", key="alice")).json["choices"]
                assert not {value for value, _ in others} & set(values)

            async def seen(of: str) -> set[tuple[str, str]]:
                asked = urlencode({"after": 0, "of": of})
                return names((await both.ask(f"/timeline/steps?{asked}", key="alice")).json)

            assert [await seen(of) for of in ("", *values)] == [set(), set(), {("there", "")}]
            for wrong in ("scheduler:127.0.0.1:1", addresses[1], "model:\n", "model:" + "x" * 200):
                asked = urlencode({"after": 0, "of": wrong})
                assert (await both.ask(f"/timeline/steps?{asked}", key="alice")).status == 404
    assert (await served[1].ask("/timeline/about", key="boss")).json["choices"] == []


async def test_many_pages_at_once_are_answered_or_told_to_wait(served: tuple[Stack, Door]) -> None:
    _, door = served
    await complete(door, "alice", "one")
    answers = await asyncio.gather(*(door.ask("/timeline/steps?after=0", key="boss") for _ in range(100)))
    assert {one.status for one in answers} == {200}
    told = [one.json for one in answers]
    assert all(one["parts"] or "too many calls watch the steps" in one["error"] for one in told)
    assert sum(bool(one["parts"]) for one in told) >= 16


async def test_the_page_is_its_own_files_under_a_strict_policy(served: tuple[Stack, Door]) -> None:
    _, door = served
    moved = await door.ask("/timeline")
    assert (moved.status, moved.headers["location"]) == (308, "timeline/")
    for name in ("", *timeline_page.FILES):
        answer = await door.ask(f"/timeline/{name}")
        assert (answer.status, answer.body) == (200, timeline_page.file(name or "index.html"))
        assert answer.headers["content-type"] == timeline_page.FILES[name or "index.html"]
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
    for path in ("/timeline/nothing", "/timeline/../app.py", "/timeline/__init__.py"):
        assert (await door.ask(path)).status == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}),
        ("/v1/completions", {"prompt": ["Hi", "Ho"], "max_tokens": 3}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["Ho"], "method": "likelihood"}),
    ],
)
async def test_why_finds_a_request_by_the_header_of_its_http_request_and_by_the_answers_id(
    served: tuple[Stack, Door], path: str, body: dict[str, object]
) -> None:
    stack, door = served
    answer = await door.ask(path, {"model": "", **body}, key="alice", x_request_id="ticket-4711-of-monday")
    assert answer.status == 200, answer.body
    async with aio.Client(stack.scheduler.address, security=Security(token="alice")) as client:
        found = (await client.why("…ticket-4711-of-monday")).requests
        assert len(found) == (2 if path == "/v1/completions" else 1)  # one for each prompt
        if own_id := answer.json.get("id"):
            assert [one.request_id for one in (await client.why(own_id)).requests] == [own_id]
