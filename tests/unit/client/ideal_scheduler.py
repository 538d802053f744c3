"""What a scheduler would answer, as a pure function of the request, continuations included."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.scheduler.v1 import scheduler_pb2 as pb

PIECES = ("a", "bc ", "é", "日本", "🙂", "")  # the text of token ids, by id modulo their number
DIGEST, MODEL, SAMPLER, ADAPTER = b"digest of the prompt", b"the model", "sampler-1", b"the adapter"
PROMPT_TOKENS = 5
_CALL_TOKENS = 2  # of each tool call; the last may have fewer


def ids_of(seed: int, index: int, max_tokens: int) -> list[int]:
    """The whole output of one completion."""
    draw = random.Random(zlib.crc32(f"{seed} {index}".encode()))
    return [draw.randrange(1000) for _ in range(min(max_tokens, draw.randrange(1, 12)))]


@dataclass(frozen=True, slots=True)
class Output:
    """The text of some first tokens of an output, or what of it a client has: UTF-8."""

    reasoning: bytes = b""
    text: bytes = b""
    arguments: tuple[bytes, ...] = ()  # of each tool call


def output_of(ids: list[int], count: int, *, chat: bool) -> Output:
    """The text of `count` first tokens. That of a chat begins with reasoning, and ends with tool calls."""
    pieces = [PIECES[id_ % len(PIECES)].encode() for id_ in ids[:count]]
    if not chat:
        return Output(text=b"".join(pieces))
    draw = random.Random(str(ids))
    begin = draw.randint(0, len(ids))
    end = draw.randint(begin, len(ids))
    calls = pieces[end:]
    return Output(
        b"".join(pieces[:begin]),
        b"".join(pieces[begin:end]),
        tuple(b"".join(calls[i : i + _CALL_TOKENS]) for i in range(0, len(calls), _CALL_TOKENS)),
    )


def replies(
    request: pb.GenerateRequest, draw: random.Random, *, cached_tokens: int = 0
) -> Iterator[pb.GenerateResponse]:
    """A whole stream, cut into deltas as `draw` likes; the text lags one token after the ids."""
    max_tokens = request.stop.max_tokens or 10
    had = {one.index: one for one in request.continuation.completions}
    if request.HasField("continuation"):
        told = request.continuation
        assert (told.prompt_digest, told.model_fingerprint, told.sampler) == (DIGEST, MODEL, SAMPLER)
        assert told.adapter_fingerprint == (ADAPTER if request.model else b"")
        assert request.sampling.temperature == 0.5  # as Started resolved it
    yield pb.GenerateResponse(
        started=pb.Started(
            request_id=request.request_id,
            model="ideal",
            prompt_tokens=PROMPT_TOKENS,
            cached_tokens=cached_tokens,
            sampling=pb.SamplingParams(
                temperature=0.5, seed=request.sampling.seed, logprobs=request.sampling.logprobs
            ),
            max_tokens=max_tokens,
            prompt_digest=DIGEST,
            model_fingerprint=MODEL,
            sampler=SAMPLER,
            continued_tokens=sum(len(one.token_ids) for one in had.values()),
            adapter_fingerprint=ADAPTER if request.model else b"",
        )
    )
    if request.HasField("prompt_logprobs") and not any(one.token_ids for one in had.values()):
        yield from _prompt_logprobs(request, draw)
    streams = []
    for index in range(max(request.n, 1)):
        ids = ids_of(request.sampling.seed, index, max_tokens)
        one = had.get(index, pb.ContinuedCompletion())
        assert list(one.token_ids) == ids[: len(one.token_ids)]
        if not one.finished:
            streams.append(_completion(request, index, ids, one, draw))
    while streams:
        stream = draw.choice(streams)
        message = next(stream, None)
        if message is None:
            streams.remove(stream)
        else:
            yield message


def _completion(
    request: pb.GenerateRequest, index: int, ids: list[int], had: pb.ContinuedCompletion, draw: random.Random
) -> Iterator[pb.GenerateResponse]:
    chat = request.HasField("messages")
    written = request.returns != pb.RETURNS_TOKEN_IDS
    whole = output_of(ids, len(ids) if written else 0, chat=chat)
    sent = Output(
        whole.reasoning[: had.reasoning_bytes],
        whole.text[: had.text_bytes],
        tuple(call[:size] for call, size in zip(whole.arguments, had.argument_bytes, strict=False)),
    )
    at = len(had.token_ids)
    while at < len(ids) or sent != whole:
        to = min(len(ids), at + draw.randrange(1, 4))
        seen = output_of(ids, (to if to == len(ids) else to - 1) if written else 0, chat=chat)
        delta = pb.Delta(
            token_ids=ids[at:to],
            text=seen.text[len(sent.text) :].decode(),
            reasoning=seen.reasoning[len(sent.reasoning) :].decode(),
            tool_calls=_new_calls(sent.arguments, seen.arguments),
            elapsed_us=1000 * to,
        )
        if request.sampling.logprobs:
            delta.logprobs.extend(pb.TokenLogprobs(logprob=-id_ / 8) for id_ in ids[at:to])
        at, sent = to, seen
        yield pb.GenerateResponse(index=index, delta=delta)
    usage = pb.Usage(
        prompt_tokens=5,
        completion_tokens=len(ids),
        first_token_ms=1,
        total_ms=len(ids),
        reasoning_tokens=len(ids) // 2,
    )
    yield pb.GenerateResponse(
        index=index, finished=pb.Finished(reason=pb.FINISH_REASON_STOP, stop_string="END", usage=usage)
    )


def _prompt_logprobs(request: pb.GenerateRequest, draw: random.Random) -> Iterator[pb.GenerateResponse]:
    """In one message, or in two."""
    scores = [pb.TokenLogprobs(logprob=one) for one in prompt_logprobs_of(request.sampling.seed)]
    cut = draw.randrange(len(scores))
    for first, part in ((0, scores[:cut]), (cut, scores[cut:])):
        if part:
            yield pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first=1 + first, logprobs=part))


def prompt_logprobs_of(seed: int) -> list[float]:
    """Of all tokens of the prompt but the first."""
    return [-float(seed % 7) - i for i in range(PROMPT_TOKENS - 1)]


def _new_calls(sent: tuple[bytes, ...], seen: tuple[bytes, ...]) -> Iterator[pb.ToolCallDelta]:
    for number, arguments in enumerate(seen):
        if number >= len(sent):
            yield pb.ToolCallDelta(
                index=number, id=f"call-{number}", name="tool", arguments=arguments.decode()
            )
        elif len(sent[number]) < len(arguments):
            yield pb.ToolCallDelta(index=number, arguments=arguments[len(sent[number]) :].decode())
