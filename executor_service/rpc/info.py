"""The replies of GetInfo, GetTokenizer and GetStatus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import metadata

from paceline.executor.v1 import executor_pb2 as pb
from service_kit.contract import EXECUTOR_REVISION, in_pieces

from executor_service.backends.base import (
    EmbeddingDefaults,
    EmbeddingPooling,
    ModelDescription,
    TokenizerBundle,
)
from executor_service.contract.noise import SAMPLER_VERSION
from executor_service.rpc.codec.adapters import encode_adapter_status
from executor_service.runtime.runtime import Loaded, Runtime, RuntimeState
from executor_service.steps.running_step import StepKind

_STATES = {
    RuntimeState.LOADING: pb.EXECUTOR_STATE_LOADING,
    RuntimeState.SERVING: pb.EXECUTOR_STATE_SERVING,
    RuntimeState.DRAINING: pb.EXECUTOR_STATE_DRAINING,
    RuntimeState.FAILED: pb.EXECUTOR_STATE_FAILED,
}


_POOLINGS = {
    None: pb.EMBEDDING_POOLING_UNSPECIFIED,
    EmbeddingPooling.LAST: pb.EMBEDDING_POOLING_LAST,
    EmbeddingPooling.MEAN: pb.EMBEDDING_POOLING_MEAN,
    EmbeddingPooling.CLS: pb.EMBEDDING_POOLING_CLS,
}


_SAMPLING = [
    pb.CAPABILITY_VERIFY,
    pb.CAPABILITY_MULTI_STEP,
    pb.CAPABILITY_TOP_K,
    pb.CAPABILITY_FULL_LOGITS,
    pb.CAPABILITY_MASKS,
]
"""What needs an output layer."""

_STEP_KINDS = {
    StepKind.PREFILL: pb.STEP_KIND_PREFILL,
    StepKind.DECODE: pb.STEP_KIND_DECODE,
    StepKind.VERIFY: pb.STEP_KIND_VERIFY,
    StepKind.MIXED: pb.STEP_KIND_MIXED,
    StepKind.OPS: pb.STEP_KIND_OPS,
    StepKind.FORWARD: pb.STEP_KIND_FORWARD,
}


def version() -> str:
    """Paceline's version; "dev" in a source tree that is not installed."""
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "dev"


def capabilities(
    info: ModelDescription, *, grammars: bool = False, adapters: bool = False
) -> list[pb.Capability.ValueType]:
    """What the executor can do: the engine's capabilities, and those that depend on the model."""
    offered = [
        pb.CAPABILITY_NATIVE_UNIFIED_DECODE,
        pb.CAPABILITY_PREFIX_CACHE,
        pb.CAPABILITY_FORK,
    ]
    offered += _SAMPLING if info.can_sample else [pb.CAPABILITY_CLASSIFIER]
    if info.can_forward:
        offered.append(pb.CAPABILITY_FORWARD)
    if info.can_mask_forward:
        offered.append(pb.CAPABILITY_FORWARD_MASKS)
    if info.has_tokenizer:
        offered.append(pb.CAPABILITY_TOKENIZER)
    if info.can_score:
        offered.append(pb.CAPABILITY_SCORES)
    if info.can_pool:
        offered.append(pb.CAPABILITY_POOLING)
    if grammars:
        offered += [pb.CAPABILITY_GRAMMAR, pb.CAPABILITY_GRAMMAR_BEGIN]
    if adapters:
        offered.append(pb.CAPABILITY_ADAPTERS)
    return offered


def encode_info(runtime: Runtime, loaded: Loaded) -> pb.GetInfoResponse:
    """The reply of GetInfo."""
    info, limits = loaded.info, loaded.limits
    return pb.GetInfoResponse(
        epoch=runtime.epoch,
        model=pb.ModelInfo(
            name=info.name,
            architecture=info.architecture,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            parameters=info.parameters,
            dtype=info.dtype,
            device=info.device,
            hidden_size=info.hidden_size,
            layers=info.layers,
            kv_bytes_per_token=info.kv_bytes_per_token,
            eos_token_ids=info.eos_token_ids,
            heads=info.heads,
            kv_heads=info.kv_heads,
            head_size=info.head_size,
            attention_kinds=_attention_kinds(info),
            supported_dtypes=info.supported_dtypes,
            supported_devices=info.supported_devices,
            weight_bytes=runtime.weight_bytes,
            embedding=_embedding(info.embedding) if info.can_pool else None,
            attention_window=info.attention_window if info.heads else 0,
            version=info.card.version,
            license=info.card.license,
            metadata=info.card.metadata,
            ranks=info.ranks,
            parallelism=pb.PARALLELISM_NONE if info.ranks == 1 else pb.PARALLELISM_TENSOR,
            loaded_at_s=loaded.at_s,
        ),
        limits=pb.Limits(
            page_size=limits.page_size,
            total_pages=limits.total_pages,
            max_sequences=limits.max_sequences,
            max_rows=limits.max_rows,
            max_step_tokens=limits.max_step_tokens,
            max_in_flight=limits.max_in_flight,
            max_drafts=limits.max_drafts,
            max_steps=limits.max_steps,
            max_logprobs=limits.max_logprobs,
            max_logit_bias=limits.max_logit_bias,
            max_stop_token_ids=limits.max_stop_token_ids,
            max_full_logits_bytes=limits.max_full_logits_bytes,
            max_message_bytes=limits.max_message_bytes,
            max_ops=limits.max_ops,
            max_released_ids=limits.max_released_ids,
            max_salt_bytes=limits.max_salt_bytes,
            max_label_bytes=limits.max_label_bytes,
            max_sessions=limits.max_sessions,
            max_queued_steps=limits.max_queued_steps,
            min_lease_ms=limits.min_lease_ms,
            max_lease_ms=limits.max_lease_ms,
            max_default_pages=limits.max_default_pages,
            max_default_sequences=limits.max_default_sequences,
            max_piece_tokens=limits.max_piece_tokens,
            max_grammar_bytes=limits.max_grammar_bytes,
            max_grammar_compile_fuel=limits.max_grammar_compile_fuel,
            max_grammar_step_fuel=limits.max_grammar_step_fuel,
            max_adapters=limits.max_adapters,
            max_adapter_slots=limits.max_adapter_slots,
            max_adapter_rank=limits.max_adapter_rank,
            max_adapter_bytes=limits.max_adapter_bytes,
        ),
        capabilities=capabilities(
            info, grammars=loaded.grammars is not None, adapters=loaded.adapters is not None
        ),
        fingerprints=pb.Fingerprints(
            model=info.fingerprint,
            vocabulary=loaded.vocabulary_fingerprint,
            sampler=SAMPLER_VERSION,
            grammar="" if loaded.grammars is None else loaded.grammars.fingerprint,
        ),
        version=version(),
        backend=runtime.config.backend,
        contract_revision=EXECUTOR_REVISION,
    )


def _embedding(embedding: EmbeddingDefaults) -> pb.EmbeddingDefaults:
    return pb.EmbeddingDefaults(
        pooling=_POOLINGS[embedding.pooling],
        normalize=embedding.normalize,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
    )


def _attention_kinds(info: ModelDescription) -> list[pb.AttentionKind.ValueType]:
    """Which kinds the layers have; none where there are no layers."""
    kinds = []
    if info.heads and info.full_attention:
        kinds.append(pb.ATTENTION_KIND_FULL)
    if info.heads and info.attention_window:
        kinds.append(pb.ATTENTION_KIND_SLIDING_WINDOW)
    return kinds


def encode_tokenizer(files: TokenizerBundle, info: ModelDescription) -> Iterator[pb.GetTokenizerResponse]:
    """The replies of GetTokenizer: everything in the first, but for the rest of a long tokenizer.json."""
    reply = pb.GetTokenizerResponse(
        tokenizer_json=files.tokenizer_json,
        chat_template=files.chat_template,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        add_bos=files.add_bos,
        eos_token_ids=info.eos_token_ids,
        generation_defaults=files.generation_defaults,
    )
    return in_pieces(reply)


def encode_status(runtime: Runtime, loaded: Loaded | None) -> pb.GetStatusResponse:
    """The reply of GetStatus, also while the model is loading."""
    worker = runtime.worker
    response = pb.GetStatusResponse(
        epoch=runtime.epoch,
        state=_STATES[runtime.state],
        loading=runtime.loading,
        load_fraction=runtime.load_fraction,
        uptime_s=time.monotonic() - runtime.started_s,
        memory_bytes=runtime.memory(),
    )
    if loaded is None:
        return response
    store, cache, counters = loaded.engine.store, loaded.engine.store.pages, loaded.engine.counters
    response.sessions = len(store.sessions)
    response.sequences = store.count
    response.queued_steps = worker.queued
    response.step_age_s = worker.busy_s
    if (running := loaded.engine.running_step) is not None:
        kind = _STEP_KINDS[running.kind]
        response.running_step.CopyFrom(pb.RunningStep(kind=kind, rows=running.rows, tokens=running.tokens))
    response.steps = counters.steps
    response.rows = counters.rows
    response.tokens_computed = counters.tokens_computed
    response.tokens_sampled = counters.tokens_sampled
    response.drafts_verified = counters.drafts_verified
    response.drafts_accepted = counters.drafts_accepted
    response.compute_s = counters.compute_s
    response.prefill_steps = counters.prefill_steps
    response.decode_steps = counters.decode_steps
    response.prefill_s = counters.prefill_s
    response.decode_s = counters.decode_s
    response.prefill_rows = counters.prefill_rows
    response.decode_rows = counters.decode_rows
    response.steps_abandoned = counters.steps_abandoned
    if loaded.adapters is not None:
        response.adapters.CopyFrom(encode_adapter_status(store.adapters))
    # Read once, because the device thread may change them meanwhile and their sum must hold.
    free, cached = cache.free, cache.cached
    response.cache.CopyFrom(
        pb.CacheStatus(
            total_pages=cache.total,
            free_pages=free,
            cached_pages=cached,
            owned_pages=cache.total - free - cached,
            prefix_hit_tokens=cache.hit_tokens,
            prefix_query_tokens=cache.query_tokens,
            evictions=cache.evictions,
            page_copies=cache.copies,
        )
    )
    return response
