"""Encodes responses about the model, its tokenizer, the executors and the load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.contract import SCHEDULER_REVISION, in_pieces
from service_kit.identity import Identity

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import DraftingWish
from scheduler_service.core.snapshot import Snapshot
from scheduler_service.core.watchdog import Fault
from scheduler_service.metrics.rates import Rates
from scheduler_service.model import (
    DraftingOffer,
    EmbeddingDefaults,
    ExecutorView,
    ServedAdapter,
    ServedModel,
    ServiceState,
    TokenizerSource,
)
from scheduler_service.rpc.codec.adapters import named_adapters
from scheduler_service.rpc.codec.embed import POOLINGS
from scheduler_service.rpc.codec.requests import DRAFTERS
from scheduler_service.rpc.codec.tools import MAX_TOOLS
from scheduler_service.rpc.codec.waits import wait_reason, wait_times
from scheduler_service.text.vocabulary import Vocabulary

TOKEN_IDS_AT_ONCE = 1 << 14
"""Token ids encoded in one part of a TokenizeResponse, which takes less than a millisecond."""
TOKENS_AT_ONCE = 1 << 10
"""Tokens whose bytes are encoded in one part."""
VOCABULARY_BYTES = 1 << 20
"""Of a reply, after which it has no further part."""


def tokenize_response(ids: Sequence[int]) -> Iterator[bytes]:
    """An encoded TokenizeResponse in parts to be concatenated (protobuf joins repeated fields)."""
    for start in range(0, len(ids), TOKEN_IDS_AT_ONCE):
        yield pb.TokenizeResponse(token_ids=ids[start : start + TOKEN_IDS_AT_ONCE]).SerializeToString()


def shown_tokens(ids: Sequence[int], vocabulary: Vocabulary) -> Iterator[bytes]:
    """The part of an encoded TokenizeResponse that has the tokens' bytes, likewise."""
    for start in range(0, len(ids), TOKENS_AT_ONCE):
        shown = map(vocabulary.shown, ids[start : start + TOKENS_AT_ONCE])
        yield pb.TokenizeResponse(tokens=shown).SerializeToString()


def vocabulary_part(vocabulary: Vocabulary, fingerprint: bytes, size: int, first_id: int) -> Iterator[bytes]:
    """An encoded GetVocabularyResponse in parts, with the tokens from `first_id` to at most `size`."""
    sent = 0
    while first_id < size and sent < VOCABULARY_BYTES:
        ids = range(first_id, min(first_id + TOKENS_AT_ONCE, size))
        part = pb.GetVocabularyResponse(
            tokens=map(vocabulary.shown, ids), control_ids=[id_ for id_ in ids if id_ in vocabulary.special]
        ).SerializeToString()
        first_id, sent = ids.stop, sent + len(part)
        yield part
    next_id = first_id if first_id < size else 0
    yield pb.GetVocabularyResponse(fingerprint=fingerprint, next_id=next_id).SerializeToString()


def model_info(
    model: ServedModel,
    *,
    max_request_tokens: int,
    has_text: bool,
    has_chat_template: bool,
    has_directory: bool,
    queue: CoreConfig,
    drafting: DraftingOffer,
    adapters: Sequence[ServedAdapter],
    caller: Identity,
) -> pb.GetModelInfoResponse:
    """The model, the limits of a request, and the caller's own rights."""
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
            max_grammar_bytes=model.max_grammar_bytes,
            max_tools=0 if model.tool_format is None else MAX_TOOLS,
            max_inputs=limits.max_inputs,
        ),
        version=model.version,
        model_fingerprint=model.fingerprints.model,
        dtype=model.dtype,
        drafters=[number for number, drafter in DRAFTERS.items() if drafter in drafting.drafters_for(model)],
        speculation=_speculation(drafting.default),
        contract_revision=SCHEDULER_REVISION,
        capabilities=_capabilities(
            model,
            has_text=has_text,
            has_chat_template=has_chat_template,
            has_directory=has_directory,
        ),
        sampler=model.fingerprints.sampler,
        tool_format="" if model.tool_format is None else model.tool_format.name,
        adapters=named_adapters(adapters),
        embedding_size=model.embedding_size,
        embedding=_embedding(model.embedding) if model.embedding_size else None,
        model_version=model.card.version,
        license=model.card.license,
        metadata=model.card.metadata,
        loaded_at_s=model.card.loaded_at_s,
        caller=pb.Caller(
            name=caller.name,
            max_priority=caller.max_priority,
            admin=caller.admin,
            directory=caller.directory,
        ),
        vocabulary_fingerprint=model.vocabulary.fingerprint if has_text else b"",
        sampling=_default_sampling(model.default_sampling),
    )


def _default_sampling(values: Mapping[str, float]) -> pb.SamplingParams:
    sampling = pb.SamplingParams(top_k=int(values["top_k"]))
    for name in values.keys() - {"top_k"}:
        setattr(sampling, name, values[name])
    return sampling


def _capabilities(
    model: ServedModel, *, has_text: bool, has_chat_template: bool, has_directory: bool
) -> list[pb.Capability.ValueType]:
    generates = model.can_sample
    offered = {
        pb.CAPABILITY_TOKENIZER: has_text,
        pb.CAPABILITY_CHAT: has_chat_template,
        pb.CAPABILITY_MULTIPLE_COMPLETIONS: generates and model.limits.max_n > 1,
        pb.CAPABILITY_LOGPROBS: generates and model.limits.max_logprobs > 0,
        pb.CAPABILITY_SPECULATION: generates and model.max_draft_tokens > 0,
        pb.CAPABILITY_CONTINUATION: generates,
        pb.CAPABILITY_CLASSIFIER: not generates,
        pb.CAPABILITY_LABELS: True,
        pb.CAPABILITY_WAIT_REASONS: True,
        pb.CAPABILITY_STEP_LOG: True,
        pb.CAPABILITY_GRAMMAR: model.max_grammar_bytes > 0,
        pb.CAPABILITY_TOOLS: generates and model.tool_format is not None,
        pb.CAPABILITY_STRICT_TOOLS: generates and model.restricts_calls,
        pb.CAPABILITY_REASONING: generates and model.reasons,
        pb.CAPABILITY_REASONING_INPUT: generates and model.takes_reasoning,
        pb.CAPABILITY_ADAPTERS: model.has_adapters,
        pb.CAPABILITY_PROMPT_LOGPROBS: model.can_score,
        pb.CAPABILITY_SCORE: model.can_score,
        pb.CAPABILITY_EMBED: model.embedding_size > 0,
        pb.CAPABILITY_RERANK: has_text and (model.can_score or (has_chat_template and model.ranks_by_head)),
        pb.CAPABILITY_DIRECTORY: has_directory,
    }
    return [capability for capability, is_offered in offered.items() if is_offered]


def _embedding(embedding: EmbeddingDefaults) -> pb.EmbeddingInfo:
    [pooling] = (number for number, kind in POOLINGS.items() if kind is embedding.pooling)
    return pb.EmbeddingInfo(
        pooling=pooling,
        normalize=embedding.normalize,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
    )


def _speculation(default: DraftingWish) -> pb.Speculation:
    if not default.drafters:
        return pb.Speculation(mode=pb.SPECULATION_MODE_OFF)
    if default.length is None:
        return pb.Speculation(mode=pb.SPECULATION_MODE_AUTO)
    return pb.Speculation(mode=pb.SPECULATION_MODE_FIXED, draft_tokens=default.length)


def tokenizer_pieces(
    files: TokenizerSource, eos_token_ids: Iterable[int]
) -> Iterator[pb.GetTokenizerResponse]:
    """GetTokenizer's replies."""
    reply = pb.GetTokenizerResponse(
        tokenizer_json=files.tokenizer_json,
        chat_template=files.chat_template,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        add_bos=files.add_bos,
        eos_token_ids=sorted(eos_token_ids),
    )
    return in_pieces(reply)


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
    *,
    state: ServiceState,
    uptime_s: float,
    ready_executors: int,
    snapshot: Snapshot,
    rates: Rates,
    fault: Fault | None = None,
    arriving: int = 0,
) -> pb.GetStatusResponse:
    """Live counters and load figures."""
    counters = snapshot.counters
    return pb.GetStatusResponse(
        state=pb.SchedulerState.Value(f"SCHEDULER_STATE_{state.name}"),
        uptime_s=uptime_s,
        running=snapshot.running,
        waiting=snapshot.waiting,
        waiting_tokens=snapshot.waiting_tokens,
        arriving=arriving,
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
        seats=snapshot.max_sequences,
        uncomputed_tokens=snapshot.uncomputed_tokens,
        prompt_tokens_per_s=rates.prompt_tokens_per_s,
        completion_tokens_per_s=rates.completion_tokens_per_s,
        waits=wait_times(snapshot.waits),
        degraded=pb.WAIT_REASON_UNSPECIFIED if fault is None else wait_reason(fault.reason),
        degraded_detail="" if fault is None else fault.detail,
    )
