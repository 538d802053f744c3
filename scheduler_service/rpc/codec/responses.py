"""What clients are told: deltas, ends, status. Protobuf objects are built here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import Finished, FinishReason
from scheduler_service.core.request import Request, Speculation
from scheduler_service.core.snapshot import Snapshot
from scheduler_service.core.step import TopLogprobs
from scheduler_service.metrics.rates import Rates
from scheduler_service.model import Drafting, ExecutorView, Model, ServiceState, TokenizerFiles
from scheduler_service.rpc.codec.continuation import prompt_digest
from scheduler_service.rpc.codec.requests import DRAFTERS

CONTRACT_REVISION = 1
"""Of scheduler.proto: rises whenever it grows."""

TOKENIZER_PIECE_BYTES = 1 << 20

TOKEN_IDS_AT_ONCE = 1 << 14
"""Of a TokenizeResponse; they take less than a millisecond to encode."""


def tokenize_response(ids: Sequence[int]) -> Iterator[bytes]:
    """An encoded TokenizeResponse, in parts that are it when joined: repeated fields add up."""
    for start in range(0, len(ids), TOKEN_IDS_AT_ONCE):
        yield pb.TokenizeResponse(token_ids=ids[start : start + TOKEN_IDS_AT_ONCE]).SerializeToString()


def started_response(
    request: Request,
    *,
    request_id: str,
    model: Model,
    max_tokens: int,
    cached_tokens: int,
) -> pb.GenerateResponse:
    """What a client needs to continue the stream elsewhere."""
    sampling = request.sampling
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=request_id,
            model=model.name,
            prompt_tokens=len(request.prompt),
            cached_tokens=cached_tokens,
            sampling=pb.SamplingParams(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logit_bias=dict(sampling.logit_bias),
                seed=sampling.seed,
                logprobs=sampling.logprobs,
            ),
            max_tokens=max_tokens,
            prompt_digest=prompt_digest(request.prompt),
            model_fingerprint=model.identity.model,
            sampler=model.identity.sampler,
            continued_tokens=sum(len(one.ids) for one in request.continued),
        )
    )


def delta_response(
    index: int, ids: Sequence[int], text: str, logprobs: Sequence[TopLogprobs], elapsed_us: int
) -> pb.GenerateResponse:
    """New ids and text of one completion."""
    response = pb.GenerateResponse()
    if index:
        response.index = index
    delta = response.delta  # filled in place: copying it into its response would cost as much again
    delta.token_ids.extend(ids)
    delta.text = text
    delta.elapsed_us = elapsed_us
    if logprobs:
        delta.logprobs.extend(
            [
                pb.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)
                for one in logprobs
            ]
        )
    return response


def finished_message(event: Finished, stop_string: str | None) -> pb.Finished:
    """The good end of one completion; `stop_string` is what the front end found, if it did."""
    usage = event.usage
    message = pb.Finished(
        reason=(
            pb.FINISH_REASON_LENGTH
            if event.reason is FinishReason.LENGTH and stop_string is None
            else pb.FINISH_REASON_STOP
        ),
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            drafted_tokens=usage.drafted_tokens,
            accepted_tokens=usage.accepted_tokens,
            preemptions=usage.preemptions,
            queue_ms=_ms(usage.queue_s),
            first_token_ms=_ms(usage.first_token_s),
            total_ms=_ms(usage.total_s),
            verifications=usage.verifications,
            drafted_by_position=usage.drafted_by_position,
            accepted_by_position=usage.accepted_by_position,
        ),
    )
    if stop_string is not None:
        message.stop_string = stop_string
    elif event.matched_id is not None and event.reason is FinishReason.EOS:
        message.eos_token_id = event.matched_id
    elif event.matched_id is not None:
        message.stop_token_id = event.matched_id
    return message


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


class Collector:
    """A stream's messages, gathered into one response."""

    def __init__(self, request_id: str) -> None:
        self._response = pb.GenerateUnaryResponse(request_id=request_id)
        self._completions: dict[int, pb.Completion] = {}
        self._text: dict[int, list[str]] = {}

    def add(self, messages: Sequence[pb.GenerateResponse]) -> None:
        """Take more of the stream."""
        for message in messages:
            index = message.index
            completion = self._completions.setdefault(index, pb.Completion(index=index))
            kind = message.WhichOneof("event")
            if kind == "finished":
                completion.finished.CopyFrom(message.finished)
            elif kind == "delta":
                completion.token_ids.extend(message.delta.token_ids)
                completion.logprobs.extend(message.delta.logprobs)
                self._text.setdefault(index, []).append(message.delta.text)

    def response(self) -> pb.GenerateUnaryResponse:
        """All completions, by index."""
        for index, completion in sorted(self._completions.items()):
            completion.text = "".join(self._text.get(index, ()))
            self._response.completions.append(completion)
        return self._response


def model_info(
    model: Model,
    *,
    max_request_tokens: int,
    has_text: bool,
    has_chat_template: bool,
    queue: CoreConfig,
    drafting: Drafting,
) -> pb.GetModelInfoResponse:
    """The model and the limits of a request."""
    limits = model.limits
    return pb.GetModelInfoResponse(
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        max_request_tokens=max_request_tokens,
        eos_token_ids=sorted(model.eos_token_ids),
        has_chat_template=has_chat_template,
        limits=pb.RequestLimits(
            max_n=limits.max_n,
            max_stop_strings=limits.max_stop_strings,
            max_stop_string_bytes=limits.max_stop_string_bytes,
            max_stop_token_ids=limits.max_stop_token_ids,
            max_logit_bias=limits.max_logit_bias,
            max_logprobs=limits.max_logprobs,
            max_prompt_bytes=limits.max_prompt_bytes,
            max_queued_requests=queue.max_queued_requests,
            max_queued_tokens=queue.max_queued_tokens,
            max_draft_tokens=model.max_draft_tokens,
        ),
        version=model.version,
        model_fingerprint=model.identity.model,
        dtype=model.dtype,
        drafters=[number for number, drafter in DRAFTERS.items() if drafter in drafting.drafters],
        speculation=_speculation(drafting.default),
        contract_revision=CONTRACT_REVISION,
        capabilities=_capabilities(model, has_text=has_text, has_chat_template=has_chat_template),
        sampler=model.identity.sampler,
    )


def _capabilities(model: Model, *, has_text: bool, has_chat_template: bool) -> list[pb.Capability.ValueType]:
    offered = {
        pb.CAPABILITY_TOKENIZER: has_text,
        pb.CAPABILITY_CHAT: has_chat_template,
        pb.CAPABILITY_MULTIPLE_COMPLETIONS: model.limits.max_n > 1,
        pb.CAPABILITY_LOGPROBS: model.limits.max_logprobs > 0,
        pb.CAPABILITY_SPECULATION: model.max_draft_tokens > 0,
        pb.CAPABILITY_CONTINUATION: True,
    }
    return [capability for capability, is_offered in offered.items() if is_offered]


def _speculation(default: Speculation) -> pb.Speculation:
    if not default.drafters:
        return pb.Speculation(mode=pb.SPECULATION_MODE_OFF)
    if default.length is None:
        return pb.Speculation(mode=pb.SPECULATION_MODE_AUTO)
    return pb.Speculation(mode=pb.SPECULATION_MODE_FIXED, draft_tokens=default.length)


def tokenizer_pieces(
    files: TokenizerFiles, eos_token_ids: Iterable[int]
) -> Iterator[pb.GetTokenizerResponse]:
    """GetTokenizer's replies: the first has all but the rest of tokenizer.json."""
    json = files.tokenizer_json
    yield pb.GetTokenizerResponse(
        tokenizer_json=json[:TOKENIZER_PIECE_BYTES],
        chat_template=files.chat_template,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        add_bos=files.add_bos,
        eos_token_ids=sorted(eos_token_ids),
    )
    for start in range(TOKENIZER_PIECE_BYTES, len(json), TOKENIZER_PIECE_BYTES):
        yield pb.GetTokenizerResponse(tokenizer_json=json[start : start + TOKENIZER_PIECE_BYTES])


def executor_list(executors: Sequence[ExecutorView]) -> admin_pb2.ListExecutorsResponse:
    """The operator's view of them."""
    return admin_pb2.ListExecutorsResponse(
        executors=[
            admin_pb2.Executor(
                address=executor.address,
                connected=executor.connected,
                detail=executor.detail,
                total_pages=executor.total_pages,
                available_pages=executor.available_pages,
                losses=executor.losses,
                active=executor.active,
                draft=executor.draft,
                draining=executor.draining,
            )
            for executor in executors
        ]
    )


def service_status(
    *, state: ServiceState, uptime_s: float, ready_executors: int, snapshot: Snapshot, rates: Rates
) -> pb.GetStatusResponse:
    """Live counters and load figures."""
    counters = snapshot.counters
    return pb.GetStatusResponse(
        state=pb.SchedulerState.Value(f"SCHEDULER_STATE_{state.name}"),
        uptime_s=uptime_s,
        running=snapshot.running,
        waiting=snapshot.waiting,
        waiting_tokens=snapshot.waiting_tokens,
        ready_executors=ready_executors,
        requests=counters.requests,
        finished=counters.finished,
        cancelled=counters.cancelled,
        failed=counters.failed,
        refused=counters.refused,
        preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        completion_tokens=counters.completion_tokens,
        steps=counters.steps,
        step_ms=snapshot.step_s * 1000,
        batch_rows=snapshot.step_rows,
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=counters.accepted_tokens,
        verifications=counters.verifications,
        draft_step_ms=snapshot.draft_step_s * 1000,
        page_size=snapshot.page_size,
        total_pages=snapshot.total_pages,
        available_pages=snapshot.free_pages + snapshot.evictable_pages,
        seats=snapshot.seats,
        uncomputed_tokens=snapshot.uncomputed_tokens,
        prompt_tokens_per_s=rates.prompt_tokens_per_s,
        completion_tokens_per_s=rates.completion_tokens_per_s,
    )
