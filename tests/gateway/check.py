"""Everything that the OpenAI API offers here, asked for with OpenAI's own Python SDK.

usage: python -m tests.gateway.check URL [--scheduler HOST:PORT] [--key KEY]

URL is of the API (http://127.0.0.1:8000/v1). With the scheduler's own address, it is also checked that
requests whose client has left are gone within 0.5 s. Prints a line for each check; exit status 1 if one
failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from paceline import Client
from paceline.channel import Security

IDLE_S = 0.5
CONCURRENT = 16
QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "people": {"type": "integer", "maximum": 9}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@dataclass
class Service:
    """What is checked: `api` is openai.AsyncOpenAI."""

    api: Any
    model: str
    scheduler: str = ""  # its own address; "": unknown
    token: str = ""  # for it
    more: Mapping[str, Any] = field(default_factory=dict)  # options of chats

    async def chat(self, **options: Any) -> Any:
        """A chat, greedy and of 24 tokens unless told otherwise."""
        given = {"messages": QUESTION, "max_tokens": 24, "temperature": 0, **self.more, **options}
        return await self.api.chat.completions.create(model=self.model, **given)

    async def complete(self, prompt: Any = "Once upon a time", **options: Any) -> Any:
        """A completion, as `chat`."""
        given = {"max_tokens": 24, "temperature": 0, **options}
        return await self.api.completions.create(model=self.model, prompt=prompt, **given)


Check = Callable[[Service], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """One of the checks, in the order of the file."""
    CHECKS.append(function)
    return function


@check
async def models(service: Service) -> None:
    import openai

    listed = [model.id async for model in service.api.models.list()]
    assert service.model in listed
    assert (await service.api.models.retrieve(service.model)).id == service.model
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        await service.api.chat.completions.create(model="no-such-model", messages=QUESTION)


@check
async def chat(service: Service) -> None:
    answer, again = await service.chat(), await service.chat()
    [choice] = answer.choices
    assert choice.message.content
    assert choice.message.content == again.choices[0].message.content
    usage = answer.usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert usage.completion_tokens <= 24
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert choice.finish_reason in ("stop", "length")


@check
async def chat_streamed(service: Service) -> None:
    whole = await service.chat()
    text, usage, reasons = "", None, []
    stream = await service.chat(stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@check
async def seeds(service: Service) -> None:
    def sampled(seed: int) -> Any:
        return service.chat(temperature=1.0, seed=seed, max_tokens=16)

    texts = [(await sampled(seed)).choices[0].message.content for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@check
async def several_completions(service: Service) -> None:
    answer = await service.chat(n=3, temperature=1.0, seed=1, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 24


@check
async def stop_strings(service: Service) -> None:
    whole = (await service.complete()).choices[0].text
    words = whole.split(" ")
    across = " ".join(words[3:5])  # two words, so that it is several tokens
    for stop in (words[3], [across], ["never in a text", words[2]]):
        first = stop if isinstance(stop, str) else stop[-1]
        [choice] = (await service.complete(stop=stop)).choices
        assert choice.finish_reason == "stop", stop
        assert choice.text == whole[: whole.index(first)], (stop, choice.text, whole)
        text = ""
        async for chunk in await service.complete(stop=stop, stream=True):
            text += chunk.choices[0].text if chunk.choices else ""
        assert text == choice.text


@check
async def logprobs(service: Service) -> None:
    answer = await service.chat(logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    text = "".join(token.token for token in content)
    assert answer.choices[0].message.content in text
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0
        assert token.logprob == max(other.logprob for other in token.top_logprobs)  # it is greedy
    streamed: list[Any] = []
    async for chunk in await service.chat(logprobs=True, top_logprobs=3, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert [token.logprob for token in streamed] == [token.logprob for token in content]


@check
async def completions(service: Service) -> None:
    answer = await service.complete()
    text = answer.choices[0].text
    assert text
    assert answer.usage.completion_tokens <= 24
    several = await service.complete(["Once upon a time", "Two and two are"])
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == text
    assert (await service.complete(echo=True)).choices[0].text == "Once upon a time" + text
    streamed, usage = "", None
    stream = await service.complete(stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        streamed += chunk.choices[0].text if chunk.choices else ""
    assert streamed == text
    assert usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


@check
async def tools(service: Service) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        answer = await service.chat(tools=[WEATHER], tool_choice=choice, max_tokens=400)
        calls = answer.choices[0].message.tool_calls
        assert calls, answer
        for call in calls:
            assert call.function.name == "weather"
            assert set(json.loads(call.function.arguments)) == {"city"}
        arguments: dict[int, str] = {}
        async for chunk in await service.chat(
            tools=[WEATHER], tool_choice=choice, max_tokens=400, stream=True
        ):
            for one in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                arguments[one.index] = arguments.get(one.index, "") + (one.function.arguments or "")
        assert [json.loads(text) for text in arguments.values()] == [
            json.loads(call.function.arguments) for call in calls
        ]
    free = await service.chat(tools=[WEATHER], max_tokens=60)  # auto: text, or a call
    assert free.choices[0].finish_reason in ("stop", "length", "tool_calls")


@check
async def structured_output(service: Service) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for seed in range(4):
        answer = await service.chat(response_format=wanted, temperature=1.0, seed=seed, max_tokens=400)
        found = json.loads(answer.choices[0].message.content)
        assert set(found) == {"city", "people"}
        assert len(found["city"]) <= 8
        assert found["people"] <= 9
    answer = await service.chat(response_format={"type": "json_object"}, max_tokens=200)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@check
async def embeddings(service: Service) -> None:
    import openai

    async def embed(given: Any, **options: Any) -> Any:
        return await service.api.embeddings.create(model=service.model, input=given, **options)

    reply = await embed("The sky is blue.")
    [found] = reply.data
    assert abs(sum(value * value for value in found.embedding) - 1) < 1e-3
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    if service.scheduler:
        with Client(service.scheduler, security=Security(token=service.token)) as client:
            [ours] = client.embed(["The sky is blue."]).vectors
        assert sum(a * b for a, b in zip(found.embedding, ours, strict=True)) > 0.999
    several = await embed(["The sky is blue.", "Two and two are four."], dimensions=4)  # as base64
    assert [(one.index, len(one.embedding)) for one in several.data] == [(0, 4), (1, 4)]
    ids = await embed([[1, 2, 3], [4]], encoding_format="float")
    assert [any(one.embedding) for one in ids.data] == [True, True]
    wrong: Any
    for wrong in ("", [], "word " * 40_000):
        with pytest.raises(openai.BadRequestError):
            await embed(wrong)


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"n": 17}, "n"),
    ({"stop": ["x" * 300]}, "stop"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10_000_000}, "max_tokens"),
    ({"presence_penalty": 1000}, "presence_penalty"),
    ({"logprobs": True, "top_logprobs": 100}, "logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 40_000}]}, "context"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "objekt"}},
            }
        },
        "response_format",
    ),
    ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
    ({"extra_body": {"top_k": -7}}, "top_k"),
)


@check
async def wrong_parameters_answer_400_with_the_field(service: Service) -> None:
    import openai

    missing = []
    for options, wrong in WRONG:
        for stream in (False, True):
            try:
                await service.chat(**options, stream=stream)
            except openai.BadRequestError as error:
                if wrong not in f"{error.param} {error.code} {error.message}":
                    missing.append(f"{str(options)[:200]}: {error.message} does not name {wrong}")
            except openai.APIStatusError as error:
                missing.append(f"{str(options)[:200]}: {error.status_code} {error.message}")
            else:
                missing.append(f"{str(options)[:200]}: was taken")
    assert not missing, "\n".join(missing)


@check
async def sixteen_at_once_answer_as_alone(service: Service) -> None:
    async def one(seed: int) -> str:
        answer = await service.chat(temperature=1.0, seed=seed)
        return str(answer.choices[0].message.content)

    alone = [await one(seed) for seed in range(CONCURRENT)]
    together = await asyncio.gather(*(one(seed) for seed in range(CONCURRENT)))
    assert together == alone


@check
async def requests_of_clients_that_left_are_gone_at_once(service: Service) -> None:
    """Once in three times: where the machine is busy, even to ask may take longer."""
    if not service.scheduler:
        return
    with Client(service.scheduler, security=Security(token=service.token)) as client:
        for _ in range(3):
            streamed_s, whole_s = await _idle_after_leaving(service, client)
            print(f"    idle {streamed_s:.3f} s after streams were closed, {whole_s:.3f} s after a timeout")
            if max(streamed_s, whole_s) <= IDLE_S:
                return
    raise AssertionError(f"requests are there for more than {IDLE_S} s after their clients left")


async def _idle_after_leaving(service: Service, client: Client) -> tuple[float, float]:
    """Seconds until nothing runs: after four streams were closed, and after a timeout of a whole answer."""
    import openai

    long: dict[str, Any] = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}

    async def idle_within() -> float:
        left = time.monotonic()
        while True:
            status = await asyncio.to_thread(client.status)
            if status.running == status.waiting == 0:
                return time.monotonic() - left
            assert time.monotonic() - left < 30, status
            await asyncio.sleep(0.01)

    await idle_within()
    streams = [await service.chat(stream=True, **long) for _ in range(4)]
    for stream in streams:
        assert await anext(aiter(stream))
    for stream in streams:
        await stream.close()
    streamed_s = await idle_within()
    try:
        async with asyncio.timeout(1.0):
            await service.chat(**long)
    except (TimeoutError, openai.APITimeoutError):
        pass
    else:
        raise AssertionError("2,000 tokens took less than a second")
    return streamed_s, await idle_within()


async def run(url: str, key: str, scheduler: str, token: str, without: Collection[str] = ()) -> int:
    """Run all checks but those `without`; returns how many failed."""
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=120) as api:
        [first, *_] = [model.id async for model in api.models.list()]
        service, failed = Service(api, first, scheduler, token), 0
        for one in (one for one in CHECKS if one.__name__ not in without):
            began = time.monotonic()
            try:
                await one(service)
                verdict = "passed"
            except Exception:
                failed += 1
                verdict = "FAILED\n" + traceback.format_exc()
            print(f"{one.__name__:50s} {time.monotonic() - began:6.2f} s  {verdict}", flush=True)
    return failed


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--key", default="", help="the API key")
    parser.add_argument("--scheduler", default="", help="HOST:PORT of the scheduler itself")
    parser.add_argument("--token", default="", help="for the scheduler")
    given = parser.parse_args()
    return 1 if asyncio.run(run(given.url, given.key, given.scheduler, given.token)) else 0


if __name__ == "__main__":
    sys.exit(main())
