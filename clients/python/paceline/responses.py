"""The SDK's types from protobuf replies. Pure; shared by the blocking and the asyncio client."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from paceline.chat import ToolCall, ToolCallDelta
from paceline.errors import InternalError, incomplete
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.schemas import Parsed, SchemaLike
from paceline.types import (
    Aborted,
    AdapterInfo,
    Caller,
    Completion,
    Delta,
    Drafter,
    EmbeddingInfo,
    Event,
    ExecutorStatus,
    Finished,
    FinishReason,
    ModelInfo,
    RequestLimits,
    RequestWait,
    Speculation,
    Started,
    Status,
    TokenLogprobs,
    Usage,
    Waits,
)

_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


_DRAFTERS = {
    pb.DRAFTER_NGRAM: Drafter.NGRAM,
    pb.DRAFTER_DRAFT_EXECUTOR: Drafter.DRAFT_EXECUTOR,
    pb.DRAFTER_GRAMMAR: Drafter.GRAMMAR,
}


def event(message: pb.GenerateResponse) -> Event | None:
    """The Delta or Finished in a message; None for any other kind, such as one of a later revision.

    Raises InternalError if the message contradicts itself.
    """
    kind = message.WhichOneof("event")
    if kind == "finished":
        return _finished(message.index, message.finished)
    if kind != "delta":
        return None
    delta = message.delta
    return Delta(
        index=message.index,
        token_ids=tuple(delta.token_ids),
        text=delta.text,
        logprobs=token_logprobs(delta.logprobs),
        elapsed_us=delta.elapsed_us,
        reasoning=delta.reasoning,
        tool_calls=tuple(
            ToolCallDelta(one.index, one.id, one.name, one.arguments) for one in delta.tool_calls
        ),
    )


_SAMPLING_SETTINGS = frozenset(
    field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.name not in ("logit_bias", "seed")
)


def started(message: pb.Started) -> Started:
    """The request with its defaults filled in and the seed chosen, from a stream's first message.

    `sampling` has every sampling parameter that the scheduler set, zeros too, by name; except the seed, which
    is a field of its own, and the logit bias.
    """
    sampling = message.sampling
    return Started(
        request_id=message.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        seed=sampling.seed,
        max_tokens=message.max_tokens,
        sampling=_sampling(sampling),
        prompt_digest=message.prompt_digest,
        model_fingerprint=message.model_fingerprint,
        sampler=message.sampler,
        adapter_fingerprint=message.adapter_fingerprint,
        warnings=tuple(message.warnings),
        prompt_token_ids=tuple(message.prompt_token_ids),
    )


def completions(
    message: pb.GenerateUnaryResponse, n: int, schema: SchemaLike[Parsed] | None = None
) -> list[Completion[Parsed]]:
    """All `n` completions of a GenerateUnary reply. `schema` is the request's.

    Raises InternalError if one is missing or unfinished, or they are not in the order of their indexes.
    """
    indexes = [one.index for one in message.completions]
    if indexes != list(range(n)):
        raise incomplete(f"the reply has the completions {indexes[: n + 1]}, not 0 to {n - 1}")
    for one in message.completions:
        if not one.HasField("finished"):
            raise incomplete(f"the reply has completion {one.index} of {n} unfinished")
    return [
        Completion(
            index=one.index,
            text=one.text,
            token_ids=tuple(one.token_ids),
            logprobs=token_logprobs(one.logprobs),
            finished=_finished(one.index, one.finished),
            reasoning=one.reasoning,
            tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in one.tool_calls),
            schema=schema,
        )
        for one in message.completions
    ]


def model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    """The scheduler's model, and the limits of requests."""
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        max_request_tokens=message.max_request_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
        dtype=message.dtype,
        version=message.version,
        model_fingerprint=message.model_fingerprint,
        contract_revision=message.contract_revision,
        capabilities=tuple(
            lower_name(pb.Capability, "CAPABILITY_", capability) for capability in message.capabilities
        ),
        sampler=message.sampler,
        limits=RequestLimits(**_fields_of(RequestLimits, message.limits)),
        drafters=tuple(_DRAFTERS[drafter] for drafter in message.drafters if drafter in _DRAFTERS),
        speculation=_speculation(message.speculation),
        tool_format=message.tool_format,
        adapters=tuple(AdapterInfo(one.name, one.fingerprint, one.rank) for one in message.adapters),
        embedding_size=message.embedding_size,
        embedding=_embedding(message.embedding) if message.HasField("embedding") else None,
        model_version=message.model_version,
        license=message.license,
        metadata=MappingProxyType(dict(message.metadata)),
        loaded_at_s=message.loaded_at_s,
        caller=Caller(**_fields_of(Caller, message.caller)) if message.HasField("caller") else None,
        vocabulary_fingerprint=message.vocabulary_fingerprint,
        sampling=MappingProxyType(_sampling(message.sampling)),
    )


def _sampling(message: pb.SamplingParams) -> dict[str, float]:
    return {field.name: value for field, value in message.ListFields() if field.name in _SAMPLING_SETTINGS}


def _embedding(message: pb.EmbeddingInfo) -> EmbeddingInfo:
    return EmbeddingInfo(
        pooling=lower_name(pb.Pooling, "POOLING_", message.pooling),
        normalize=message.normalize,
        prompts=MappingProxyType(dict(message.prompts)),
        default_prompt=message.default_prompt,
    )


def models_here(entries: Iterable[pb.SchedulerEntry]) -> dict[str, str]:
    """The models of one address, and their states: entries without an address of their own."""
    states = pb.SchedulerState, "SCHEDULER_STATE_"
    return {one.model: lower_name(*states, one.state) for one in entries if not one.address}


def status(message: pb.GetStatusResponse) -> Status:
    """The scheduler's counters."""
    values = _fields_of(Status, message)
    values["state"] = lower_name(pb.SchedulerState, "SCHEDULER_STATE_", message.state)
    degraded = message.degraded
    values["degraded"] = lower_name(pb.WaitReason, "WAIT_REASON_", degraded) if degraded else ""
    values["waits"] = waits(message.waits)
    return Status(**values)


def why(messages: Iterable[pb.WhyWaitingResponse]) -> Waits:
    """The joined result of WhyWaiting, sent to one or more schedulers."""
    replies = list(messages)
    return Waits(
        tuple(_request_wait(one) for reply in replies for one in reply.requests),
        sum(reply.left_out for reply in replies),
    )


def _request_wait(message: pb.RequestWait) -> RequestWait:
    values = _fields_of(RequestWait, message)
    values["phase"] = lower_name(pb.RequestPhase, "REQUEST_PHASE_", message.phase)
    for name in ("reason", "first_reason"):
        values[name] = lower_name(pb.WaitReason, "WAIT_REASON_", values[name]) if values[name] else ""
    for name in ("queue_waits", "preempted_waits"):
        values[name] = waits(values[name])
    values["labels"] = dict(message.labels)
    return RequestWait(**values)


def executors(message: admin_pb2.ListExecutorsResponse) -> tuple[ExecutorStatus, ...]:
    """The executors, as AdminService lists them."""
    return tuple(ExecutorStatus(**_fields_of(ExecutorStatus, one)) for one in message.executors)


def adapter(message: admin_pb2.LoadedAdapter) -> AdapterInfo:
    """An adapter, as AdminService tells of it."""
    return AdapterInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        rank=message.rank,
        memory_bytes=message.bytes,
        requests=message.requests,
        running=message.running,
        waiting=message.waiting,
    )


def aborted(request_ids: Sequence[str], messages: Iterable[pb.AbortResponse]) -> Aborted:
    """The joined result of an Abort sent to one or more schedulers; ids keep the caller's order."""
    found = {request_id for message in messages for request_id in message.aborted}
    return Aborted(
        tuple(id_ for id_ in request_ids if id_ in found),
        tuple(id_ for id_ in request_ids if id_ not in found),
    )


class Progress:
    """Checks that each of a stream's `n` completions finishes exactly once before the stream ends OK."""

    def __init__(self, n: int) -> None:
        self._unfinished = dict.fromkeys(range(n))

    def see(self, event: Event) -> Event:
        """Record the next event and return it.

        Raises InternalError if its completion has finished or was not requested.
        """
        if event.index not in self._unfinished:
            raise InternalError(
                f"an event of completion {event.index}, which has finished or was not requested"
            )
        if isinstance(event, Finished):
            del self._unfinished[event.index]
        return event

    def check_end(self) -> None:
        """Call when the stream has ended OK. Raises InternalError if a completion is unfinished."""
        for index in self._unfinished:
            raise incomplete(f"the stream ended before completion {index} finished")


def _finished(index: int, message: pb.Finished) -> Finished:
    matched = message.WhichOneof("matched")
    try:
        reason = _REASONS[message.reason]
    except KeyError:
        raise InternalError(f"completion {index} ended with the unknown reason {message.reason}") from None
    return Finished(
        index=index,
        reason=reason,
        usage=_usage(message.usage),
        eos_token_id=message.eos_token_id if matched == "eos_token_id" else None,
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
    )


def _usage(message: pb.Usage) -> Usage:
    values = _fields_of(Usage, message)
    for name in ("drafted_by_position", "accepted_by_position"):
        values[name] = tuple(values[name])
    for name in ("queue_waits", "preempted_waits"):
        values[name] = waits(values[name])
    return Usage(**values)


def waits(times: Iterable[pb.WaitTime]) -> dict[str, int]:
    """Microseconds by reason, in lower case: pages, seats, ..."""
    return {lower_name(pb.WaitReason, "WAIT_REASON_", time.reason): time.us for time in times}


def _fields_of(kind: Any, message: Any) -> dict[str, Any]:
    """The message's values of the dataclass's fields. Fields that the dataclass lacks are left out."""
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(kind)}


def lower_name(enum: Any, prefix: str, value: int) -> str:
    """An enum value's name without its prefix, in lower case; its number if it is of a later revision."""
    try:
        return str(enum.Name(value)).removeprefix(prefix).lower()
    except ValueError:
        return str(value)


def _speculation(message: pb.Speculation) -> Speculation:
    match message.mode:
        case pb.SPECULATION_MODE_OFF:
            return Speculation("off")
        case pb.SPECULATION_MODE_AUTO:
            return Speculation("auto")
        case pb.SPECULATION_MODE_FIXED:
            return Speculation(message.draft_tokens)
    return Speculation()


def token_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """One per token. Raises InternalError if one contradicts itself, or is not a number."""
    try:
        found = tuple(
            TokenLogprobs(one.logprob, tuple(zip(one.top_ids, one.top_logprobs, strict=True)))
            for one in messages
        )
    except ValueError:
        raise InternalError("a token's top_ids and top_logprobs differ in length") from None
    for one in found:
        if math.isnan(one.logprob) or any(math.isnan(logprob) for _, logprob in one.top):
            raise InternalError("a token's logprob is not a number")
    return found
