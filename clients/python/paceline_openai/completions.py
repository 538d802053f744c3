"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from paceline import Completion, Delta, Event, Finished, ModelInfo, TokenLogprobs
from paceline.aio import Generation
from paceline.errors import PacelineError

from paceline_openai import sampling
from paceline_openai.calls import Call, all_of
from paceline_openai.fields import Field, Table, array, boolean, integer, text, tokens
from paceline_openai.logprobs import CompletionLogprobs, joined
from paceline_openai.prompts import Echo, Prompt, echoes
from paceline_openai.refusals import bad
from paceline_openai.streams import Chunks, head
from paceline_openai.usage import reason, stopped_by, usage

MAX_PROMPTS = 256


def prompts(value: Any, name: str) -> list[Prompt]:
    """A text, texts, token ids, or several lists of them."""
    if isinstance(value, str):
        return [text(value, name)]
    given = array(value, name)
    if given and isinstance(given[0], int):
        return [tokens(given, name)]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise bad(name, f"{name}: expected 1 to {MAX_PROMPTS} prompts, got {len(given)}")
    return [
        text(one, f"{name}[{index}]") if isinstance(one, str) else tokens(one, f"{name}[{index}]")
        for index, one in enumerate(given)
    ]


TABLE = Table(
    Field("prompt", prompts, "a text, texts, token ids, or lists of them; up to 256", required=True),
    *sampling.SHARED,
    Field("max_tokens", integer(0, sampling.UINT32), "without it 16; 0 needs `echo`"),
    Field("logprobs", integer(0, sampling.UINT32), "of the tokens, and of this number of likeliest ones"),
    Field("echo", boolean, "the prompt comes first; with `logprobs` its own too"),
    Field("best_of", integer(1, sampling.UINT32), "only the value of `n`"),
    Field("suffix", None, "models here do not fill gaps", ("",)),
    Field("add_special_tokens", None, "texts begin as the tokenizer has them begin", (True,)),
    Field("prompt_logprobs", None, "ask with `echo` and `logprobs`"),
    Field("response_format", None, "use `structured_outputs`", ({"type": "text"},)),
)  # fmt: skip

_DEFAULT_TOKENS = 16  # OpenAI's


async def answer(call: Call) -> None:
    """Generate for each prompt, and send the answer. Raises Refusal, `paceline.errors`."""
    values = call.values
    options = _options(values, call.info) | call.options
    ids = [call.exchange.new_id("cmpl-") for _ in call.values["prompt"]]
    id_ = ids[0]
    given: list[Prompt] = values["prompt"]
    shown: list[Echo | None] = [None for _ in given]
    if values.get("echo"):
        shown = await echoes(call, given)
    if values.get("max_tokens") == 0:
        await call.exchange.reply_json(_reply(call, id_, [], *await _echoed(call, shown)))
        return
    generations: list[Generation] = []
    try:
        for prompt, own_id in zip(given, ids, strict=True):
            which: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
            sent = which | options | {"request_id": own_id}
            generations.append(call.client.generate(timeout_s=call.timeout_s, **sent))
        await (_stream if values.get("stream") else _whole)(call, generations, shown, id_)
    finally:
        for generation in generations:
            generation.close()


def _options(values: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The SDK's options. Raises Refusal."""
    options = sampling.sampling_options(values, info)
    options["max_tokens"] = values.get("max_tokens", _DEFAULT_TOKENS)
    if options["max_tokens"] == 0 and (not values.get("echo") or values.get("stream") or options["n"] > 1):
        raise bad("max_tokens", "max_tokens: 0 only with echo, without stream and with an n of 1")
    if values.get("best_of", options["n"]) != options["n"]:
        raise bad(
            "best_of", f"best_of: only the value of n, {options['n']}, is supported here", "unsupported_value"
        )
    if "logprobs" in values:
        options["logprobs"] = values["logprobs"]
        if values.get("echo"):
            options["prompt_logprobs"] = values["logprobs"]
    elif not values.get("return_token_ids"):
        options["returns"] = "text"
    return options


def _reply(
    call: Call, id_: str, generations: list[Generation], choices: list[Any], counts: dict[str, Any]
) -> dict[str, Any]:
    return head(call, id_, "text_completion", generations) | {"choices": choices, "usage": counts}


async def _echoed(call: Call, shown: list[Echo | None]) -> tuple[list[Any], dict[str, Any]]:
    """The prompts themselves, with the logprobs of their tokens if they are asked for; and the usage."""
    choices, count = [], 0
    for index, echo in enumerate(shown):
        assert echo is not None
        count += len(echo.ids)
        part = None
        if "logprobs" in call.values:
            scored = await call.client.score([echo.ids], top_logprobs=call.values["logprobs"], **call.options)
            writer = CompletionLogprobs(call, alternatives=bool(call.values["logprobs"]))
            part = await _prompt_part(writer, echo, scored.texts[0].logprobs)
        choices.append({"index": index, "text": echo.text, "logprobs": part, "finish_reason": "length"})
    return choices, {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}


async def _prompt_part(
    writer: CompletionLogprobs, echo: Echo, logprobs: tuple[TokenLogprobs, ...]
) -> dict[str, list[Any] | None]:
    """Of all tokens of a prompt: the first has no logprob."""
    known: list[TokenLogprobs | None] = [*logprobs]
    return await writer.part(echo.ids, [None] * (len(echo.ids) - len(known)) + known)


async def _whole(call: Call, generations: list[Generation], shown: list[Echo | None], id_: str) -> None:
    collected = await all_of(generation.collect() for generation in generations)
    choices, ends = [], []
    for place, (completions, generation, echo) in enumerate(zip(collected, generations, shown, strict=True)):
        ends.append([one.finished for one in completions if one.finished])
        for one in completions:
            choices.append(await _choice(call, one, generation, echo, place * call.values.get("n", 1)))
    await call.exchange.reply_json(_reply(call, id_, generations, choices, usage(ends)))


async def _choice(
    call: Call, one: Completion, generation: Generation, echo: Echo | None, first: int
) -> dict[str, Any]:
    assert one.finished is not None
    choice: dict[str, Any] = {
        "index": first + one.index,
        "text": (echo.text if echo else "") + one.text,
        "logprobs": None,
        "finish_reason": reason(one.finished),
        "stop_reason": stopped_by(one.finished),
    }
    if "logprobs" in call.values:
        writer = CompletionLogprobs(call, alternatives=bool(call.values["logprobs"]))
        parts = [await _prompt_part(writer, echo, generation.prompt_logprobs)] if echo else []
        choice["logprobs"] = joined([*parts, await writer.part(one.token_ids, one.logprobs)])
    if call.values.get("return_token_ids"):
        choice["token_ids"] = one.token_ids
    return choice


class _TextChunks(Chunks):
    """The chunks of the streams of all prompts."""

    def __init__(self, call: Call, shown: list[Echo | None], generations: list[Generation], id_: str) -> None:
        super().__init__(call, id_, "text_completion", generations)
        self._shown = shown
        self._n = call.values.get("n", 1)
        self._logprobs = "logprobs" in call.values
        self._ids = bool(call.values.get("return_token_ids"))
        self._writers: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()

    async def choices(self, place: int, event: Event) -> list[str]:
        """The chunks' choices; the first of a completion has the prompt, if it is asked for."""
        index, found = place * self._n + event.index, []
        if (echo := self._shown[place]) is not None and index not in self._echoed:
            self._echoed.add(index)
            part = None
            if self._logprobs:
                part = await _prompt_part(self._writer(index), echo, self._generations[place].prompt_logprobs)
            found.append(json.dumps(_piece(index, echo.text, part)))
        if isinstance(event, Finished):
            end = _piece(index, "", None) | {"finish_reason": reason(event), "stop_reason": stopped_by(event)}
            return [*found, json.dumps(end)]
        return [*found, await self._delta(index, event)]

    async def _delta(self, index: int, event: Delta) -> str:
        if not (self._logprobs or self._ids):
            content = json.dumps(event.text)
            return f'{{"index": {index}, "text": {content}, "logprobs": null, "finish_reason": null}}'
        part = await self._writer(index).part(event.token_ids, event.logprobs) if self._logprobs else None
        choice = _piece(index, event.text, part)
        if self._ids:
            choice["token_ids"] = event.token_ids
        return json.dumps(choice)

    def _writer(self, index: int) -> CompletionLogprobs:
        if index not in self._writers:
            self._writers[index] = CompletionLogprobs(
                self._call, alternatives=bool(self._call.values["logprobs"])
            )
        return self._writers[index]


def _piece(index: int, content: str, part: Any) -> dict[str, Any]:
    return {"index": index, "text": content, "logprobs": part, "finish_reason": None}


async def _stream(call: Call, generations: list[Generation], shown: list[Echo | None], id_: str) -> None:
    await _TextChunks(call, shown, generations, id_).send(_merged(generations))


async def _merged(generations: list[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """(place of the prompt, event) of all streams as they come. Raises the first `paceline.errors`."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | PacelineError | None] = asyncio.Queue(len(generations))

    async def read(place: int, generation: Generation) -> None:
        try:
            async for event in generation:
                await queue.put((place, event))
            await queue.put(None)
        except PacelineError as error:
            await queue.put(error)

    readers = [asyncio.create_task(read(*one)) for one in enumerate(generations)]
    try:
        running = len(readers)
        while running:
            item = await queue.get()
            if isinstance(item, PacelineError):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
