"""The messages of a fake stream, from its beginning or from where a continuation goes on. Pure."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.testing.calls import content_of
from paceline.testing.replies import FakeError, FakeReply
from paceline.types import FinishReason

MODEL, FINGERPRINT, SAMPLER = "fake", b"fake", "fake"
MAX_TOKENS = 1 << 16

_DEFAULTS = pb.SamplingParams(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
)
_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


class StreamRefused(Exception):
    """The request can't be answered; `error` is what its client gets."""

    def __init__(self, error: FakeError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class FakeStream:
    """What is sent: `started`, then `deltas` in order, then `finishes`."""

    request_id: str
    started: pb.GenerateResponse
    deltas: list[pb.GenerateResponse]
    finishes: list[pb.GenerateResponse]


def stream_of(reply: FakeReply, request: pb.GenerateRequest, request_id: str) -> FakeStream:
    """The stream of `reply` that answers `request`. Raises StreamRefused.

    Of a request with a continuation it has what the client lacks.
    """
    deltas, prompt = reply.deltas, prompt_bytes(request)
    had = {one.index: one for one in request.continuation.completions}
    if request.HasField("continuation"):
        _check(request.continuation, prompt)
    started = pb.Started(
        request_id=request_id,
        model=MODEL,
        prompt_tokens=len(prompt),
        sampling=_DEFAULTS,
        max_tokens=request.stop.max_tokens or MAX_TOKENS,
        prompt_digest=digest(prompt),
        model_fingerprint=FINGERPRINT,
        sampler=SAMPLER,
        continued_tokens=sum(len(one.token_ids) for one in had.values()),
    )
    started.sampling.MergeFrom(request.sampling)
    usage = pb.Usage(
        prompt_tokens=len(prompt), completion_tokens=sum(len(delta.token_ids) for delta in deltas)
    )
    finished = pb.Finished(reason=_REASONS[reply.finish], usage=usage)
    if reply.finish is FinishReason.STOP:
        finished.eos_token_id = EOS_ID
    completions, finishes = [], []
    for index in range(max(request.n, 1)):
        one = had.get(index, pb.ContinuedCompletion())
        if one.finished:
            continue
        left = deltas[_received(deltas, one) :]
        completions.append([pb.GenerateResponse(index=index, delta=_asked(request, delta)) for delta in left])
        finishes.append(pb.GenerateResponse(index=index, finished=finished))
    sent = [
        message for side in itertools.zip_longest(*completions) for message in side if message is not None
    ]
    return FakeStream(request_id, pb.GenerateResponse(started=started), sent, finishes)


EOS_ID = 256
"""The end of sequence, after the ids of the bytes."""


def prompt_bytes(request: pb.GenerateRequest | pb.TokenizeRequest) -> Sequence[int]:
    """The token ids of a prompt: the bytes of its text; of a chat, one line `role: content` a message."""
    if isinstance(request, pb.GenerateRequest) and request.HasField("token_ids"):
        return list(request.token_ids.ids)
    if request.HasField("messages"):
        lines = [f"{message.role}: {content_of(message)}\n" for message in request.messages.messages]
        return "".join(lines).encode()
    return request.text.encode()


def digest(token_ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids, as Started has it."""
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in token_ids)).digest()


def _check(continuation: pb.Continuation, prompt: Sequence[int]) -> None:
    for field, expected in (
        ("prompt_digest", digest(prompt)),
        ("model_fingerprint", FINGERPRINT),
        ("sampler", SAMPLER),
    ):
        if getattr(continuation, field) != expected:
            name = f"continuation.{field}"
            raise StreamRefused(FakeError("CONTINUATION", f"{name}: is of another stream", field=name))


def _received(deltas: Sequence[pb.Delta], had: pb.ContinuedCompletion) -> int:
    """Number of deltas that the client has. Raises StreamRefused if it has something else."""
    tokens = list(had.token_ids)
    for count in range(len(deltas) + 1):
        if tokens == [token for delta in deltas[:count] for token in delta.token_ids]:
            return count
    raise StreamRefused(
        FakeError(
            "CONTINUATION",
            f"continuation.completions: completion {had.index} has tokens that are not the fake reply's",
            field="continuation.completions",
        )
    )


def _asked(request: pb.GenerateRequest, delta: pb.Delta) -> pb.Delta:
    """The parts of a delta that the client wants."""
    mine = pb.Delta()
    mine.CopyFrom(delta)
    if request.returns == pb.RETURNS_TEXT:
        mine.ClearField("token_ids")
    elif request.returns == pb.RETURNS_TOKEN_IDS:
        for field in ("text", "reasoning", "tool_calls"):
            mine.ClearField(field)
    elif request.sampling.HasField("logprobs"):
        mine.logprobs.extend(pb.TokenLogprobs(logprob=0.0) for _ in mine.token_ids)
    return mine


def collected(stream: FakeStream) -> pb.GenerateUnaryResponse:
    """The whole stream as one response."""
    completions = {
        one.index: pb.Completion(index=one.index, finished=one.finished) for one in stream.finishes
    }
    for message in stream.deltas:
        completion, delta = completions[message.index], message.delta
        completion.token_ids.extend(delta.token_ids)
        completion.text += delta.text
        completion.reasoning += delta.reasoning
        completion.logprobs.extend(delta.logprobs)
        completion.tool_calls.extend(_calls(delta))
    return pb.GenerateUnaryResponse(request_id=stream.request_id, completions=completions.values())


def _calls(delta: pb.Delta) -> Iterator[pb.ToolCall]:
    return (pb.ToolCall(id=one.id, name=one.name, arguments=one.arguments) for one in delta.tool_calls)
