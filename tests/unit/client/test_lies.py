"""A scheduler that sends what it may not is told from one that works, before memory or time goes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import grpc
import pytest
from paceline import aio, errors, generation
from paceline.bounds import TEXT_BYTES_PER_TOKEN
from paceline.failover import Attempts, Rotation
from paceline.requests import generate_request
from paceline.resume import MAX_FRUITLESS, ResumableStream, identified
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.scenario.liar import LIES, MAX_TOKENS, lying
from tests.unit.client.answering import Run, both

_NO_CONTEXT: Any = None
_MOST_MESSAGES = 4 + MAX_TOKENS * TEXT_BYTES_PER_TOKEN


def stream_of(**options: object) -> ResumableStream:
    return ResumableStream(identified(generate_request("x", None, None, options)))


@pytest.mark.parametrize(
    ("lie", "complaint"),
    {
        "endless bytes": "more than the 4 tokens that were announced",
        "endless megabytes": "1048576 bytes of text in 1 tokens, more than 4096 a token",
        "text without tokens": "4097 bytes of text in 0 tokens",
        "finished twice": "which has finished",
        "a delta after the end": "which has finished",
        "index 4e9": "completion 4000000000",
        "tool call 4e9": "tool call 4000000000",
        "tool call 4e9, unnamed": "tool call 4000000000",
        "started twice": "twice",
        "no number": "not a number",
        "logprobs of a prompt, endless": "more logprobs of the prompt",
    }.items(),
)
@pytest.mark.parametrize("asks", [True, False])
def test_a_stream_with_more_than_may_come_raises(lie: str, complaint: str, asks: bool) -> None:
    stream = stream_of(prompt_logprobs=0, **({"max_tokens": 1000} if asks else {}))
    answers = LIES[lie](stream.attempt(0.0), _NO_CONTEXT)
    with pytest.raises(errors.InternalError, match=complaint):
        list(map(stream.see, islice(answers, _MOST_MESSAGES)))


def test_a_scheduler_that_announces_more_than_was_asked_for_is_held_to_the_request() -> None:
    stream = stream_of(max_tokens=1)
    stream.attempt(0.0)
    stream.see(pb.GenerateResponse(started=pb.Started(max_tokens=4_000_000_000)))
    delta = pb.GenerateResponse(delta=pb.Delta(token_ids=[1]))
    stream.see(delta)
    with pytest.raises(errors.InternalError, match="more than the 1 tokens"):
        stream.see(delta)


@pytest.mark.parametrize("size", [0, 1])
def test_the_longest_text_that_may_come_is_taken(size: int) -> None:
    stream = stream_of()
    stream.attempt(0.0)
    stream.see(pb.GenerateResponse(started=pb.Started(max_tokens=2)))
    text = (2 * TEXT_BYTES_PER_TOKEN - 2) * "x" + size * "x" + "é"
    message = pb.GenerateResponse(delta=pb.Delta(token_ids=[1, 2], text=text))
    if size:
        with pytest.raises(errors.InternalError, match="bytes of text"):
            stream.see(message)
    else:
        stream.see(message)


def test_logprobs_that_nobody_asked_for_have_a_bound_too() -> None:
    one = pb.TokenLogprobs(top_ids=range(33), top_logprobs=[0.0] * 33)
    for asked, is_taken in ((33, True), (1, False)):
        stream = stream_of(logprobs=asked)
        stream.attempt(0.0)
        message = pb.GenerateResponse(delta=pb.Delta(token_ids=[1], logprobs=[one]))
        if is_taken:
            stream.see(message)
        else:
            with pytest.raises(errors.InternalError, match="33 likeliest tokens"):
                stream.see(message)
    stream = stream_of(logprobs=0)
    stream.attempt(0.0)
    with pytest.raises(errors.InternalError, match="2 logprobs in 1 tokens"):
        stream.see(
            pb.GenerateResponse(delta=pb.Delta(token_ids=[1], logprobs=[pb.TokenLogprobs() for _ in "ab"]))
        )


@pytest.mark.parametrize(("brings", "attempts"), [((), MAX_FRUITLESS), ((0, 5), MAX_FRUITLESS + 6)])
def test_a_stream_that_is_begun_and_lost_again_and_again_is_given_up(
    brings: tuple[int, ...], attempts: int
) -> None:
    """`brings`: the attempts that bring a token, and begin the count anew."""
    stream = stream_of()
    for attempt in range(attempts):
        request = stream.attempt(float(attempt))
        had = sum(one < attempt for one in brings)
        started = pb.Started(max_tokens=100, continued_tokens=had, sampling=request.sampling)
        stream.see(pb.GenerateResponse(started=started))
        if attempt in brings:
            stream.see(pb.GenerateResponse(delta=pb.Delta(token_ids=[1])))
    with pytest.raises(errors.StreamLost, match="without a token"):
        stream.attempt(float(attempts))


def test_attempts_that_reach_nobody_are_not_counted() -> None:
    stream = stream_of()
    for attempt in range(3 * MAX_FRUITLESS):
        stream.attempt(float(attempt))


@both
async def test_a_scheduler_that_hangs_behind_the_last_end_holds_nobody(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (generation, aio.generation):
        monkeypatch.setattr(module, "END_TIMEOUT_S", 0.05)
    with lying() as address:
        text = await run(address, lambda client: client.generate("hangs after the end").text())
    assert text == "abcd"


@both
@pytest.mark.parametrize(
    ("lie", "hint_s"),
    [("in 1e9 s", 1e9), ("in 1e11 s", 1e11), ("5 s ago", None), ("away for 1e9 s", 1e9)],
)
async def test_a_hint_of_any_length_is_told_at_once(run: Run, lie: str, hint_s: float | None) -> None:
    with lying() as address, pytest.raises(errors.RetryLater) as caught:
        await run(address, lambda client: client.generate(lie).collect())
    assert caught.value.retry_after_s == hint_s


@both
@pytest.mark.parametrize("lie", ["broken details", "broken detail"])
async def test_details_that_cannot_be_read_are_left_out(run: Run, lie: str) -> None:
    with lying() as address, pytest.raises(errors.InternalError, match="broken") as caught:
        await run(address, lambda client: client.generate(lie).collect())
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "")


@pytest.mark.parametrize("hint_s", [0.0, 1e-9])
def test_a_scheduler_that_says_at_once_is_not_asked_without_a_pause(hint_s: float) -> None:
    attempts = Attempts(Rotation("a"), 0.0, timeout_s=None, failover_timeout_s=30.0)
    attempts.failed(errors.Unavailable("lost"), 0.0)
    assert attempts.failed(errors.QueueFull("full", retry_after_s=hint_s), 1.0) >= 0.1
