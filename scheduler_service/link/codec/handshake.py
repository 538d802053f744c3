"""Decodes an executor's replies to GetInfo, GetTokenizer and GetStatus."""

from __future__ import annotations

from paceline.executor.v1 import executor_pb2 as pb

from scheduler_service.core.step import Capacity
from scheduler_service.link.codec.foreign import brief
from scheduler_service.link.facts import ExecutorFacts, ExecutorPhase, Heartbeat
from scheduler_service.model import (
    EmbeddingDefaults,
    Fingerprints,
    ModelCard,
    ServedAdapter,
    TextPooling,
    TokenizerSource,
    TokenSpace,
)

_PHASES = {
    pb.EXECUTOR_STATE_LOADING: ExecutorPhase.LOADING,
    pb.EXECUTOR_STATE_SERVING: ExecutorPhase.SERVING,
    pb.EXECUTOR_STATE_DRAINING: ExecutorPhase.DRAINING,
    pb.EXECUTOR_STATE_FAILED: ExecutorPhase.FAILED,
}


_POOLINGS = {
    pb.EMBEDDING_POOLING_UNSPECIFIED: TextPooling.LAST,
    pb.EMBEDDING_POOLING_LAST: TextPooling.LAST,
    pb.EMBEDDING_POOLING_MEAN: TextPooling.MEAN,
    pb.EMBEDDING_POOLING_CLS: TextPooling.CLS,
}
_MAX_PROMPTS, _MAX_PROMPT_BYTES = 64, 4096


def decode_facts(info: pb.GetInfoResponse) -> ExecutorFacts:
    """The facts in a reply to GetInfo. Raises ValueError if the vocabulary or a limit is 0, and for embedding
    defaults that break the contract: other ones would silently give other vectors.
    """
    model, limits, prints = info.model, info.limits, info.fingerprints
    if model.vocab_size < 1:
        raise ValueError("the executor's vocab_size is 0")
    return ExecutorFacts(
        epoch=info.epoch,
        capacity=_capacity(info),
        fingerprints=Fingerprints(model=prints.model, sampler=prints.sampler, grammar=brief(prints.grammar)),
        vocabulary=TokenSpace(prints.vocabulary, model.vocab_size, prints.sampler),
        model_name=brief(model.name),
        architecture=brief(model.architecture),
        dtype=brief(model.dtype),
        version=brief(info.version),
        eos_token_ids=frozenset(model.eos_token_ids),
        can_fork=pb.CAPABILITY_FORK in info.capabilities,
        max_stop_token_ids=limits.max_stop_token_ids,
        max_logit_bias=limits.max_logit_bias,
        max_logprobs=limits.max_logprobs,
        max_grammar_bytes=limits.max_grammar_bytes if pb.CAPABILITY_GRAMMAR in info.capabilities else 0,
        grammars_begin=pb.CAPABILITY_GRAMMAR_BEGIN in info.capabilities,
        can_sample=pb.CAPABILITY_CLASSIFIER not in info.capabilities,
        can_score=pb.CAPABILITY_SCORES in info.capabilities,
        card=_card(model),
        embedding=_embedding(model.embedding),
    )


def _embedding(given: pb.EmbeddingDefaults) -> EmbeddingDefaults:
    prompts = dict(given.prompts)
    if given.pooling not in _POOLINGS:
        raise ValueError(f"the executor's embedding.pooling is {given.pooling}, which is not known here")
    if len(prompts) > _MAX_PROMPTS or any(
        len(part.encode()) > _MAX_PROMPT_BYTES for pair in prompts.items() for part in pair
    ):
        raise ValueError(
            f"the executor's embedding.prompts are more than {_MAX_PROMPTS}, "
            f"or longer than {_MAX_PROMPT_BYTES} bytes"
        )
    if given.default_prompt and given.default_prompt not in prompts:
        raise ValueError("the executor's embedding.default_prompt is none of its prompts")
    normalize = given.normalize if given.HasField("normalize") else True
    return EmbeddingDefaults(_POOLINGS[given.pooling], normalize, prompts, given.default_prompt)


_MAX_ENTRIES, _MAX_ENTRY_BYTES = 32, 1024  # of metadata; an entry's are those of its name and value each


def _card(model: pb.ModelInfo) -> ModelCard:
    metadata = sorted(model.metadata.items())[:_MAX_ENTRIES]
    return ModelCard(
        version=brief(model.version),
        license=brief(model.license),
        metadata={_cut(name): _cut(value) for name, value in metadata},
        loaded_at_s=model.loaded_at_s,
    )


def _cut(text: str) -> str:
    return text.encode()[:_MAX_ENTRY_BYTES].decode(errors="ignore")


_MAY_BE_0 = ("short_step_s", "max_drafts", "max_adapter_slots", "max_output_bytes", "hidden_size")


def _capacity(info: pb.GetInfoResponse) -> Capacity:
    limits, on_gpu = info.limits, info.model.device.startswith("cuda")
    capacity = Capacity(
        total_pages=limits.total_pages,
        page_size=limits.page_size,
        context_length=info.model.context_length,
        max_sequences=limits.max_sequences,
        max_rows=limits.max_rows,
        max_step_tokens=limits.max_step_tokens,
        max_drafts=limits.max_drafts if pb.CAPABILITY_VERIFY in info.capabilities else 0,
        max_steps=max(1, limits.max_steps) if pb.CAPABILITY_MULTI_STEP in info.capabilities else 1,
        max_in_flight=max(1, limits.max_in_flight),
        steps_to_be_busy=2 if on_gpu else 1,
        # A step's way to the executor and back takes 2 ms, and on CPU with 32 rows 8, as services share it.
        short_step_s=0.002 if on_gpu else 0.05,
        tokens_to_be_busy=2048 if on_gpu else 512,
        max_adapter_slots=limits.max_adapter_slots if pb.CAPABILITY_ADAPTERS in info.capabilities else 0,
        max_output_bytes=limits.max_full_logits_bytes,
        hidden_size=info.model.hidden_size if pb.CAPABILITY_POOLING in info.capabilities else 0,
    )
    for name in capacity.__slots__:
        if getattr(capacity, name) < 1 and name not in _MAY_BE_0:
            raise ValueError(f"the executor's {name} is {getattr(capacity, name)}")
    return capacity


def decode_tokenizer(message: pb.GetTokenizerResponse) -> TokenizerSource:
    """The files in a reply to GetTokenizer; the client has joined the reply's pieces."""
    return TokenizerSource(
        tokenizer_json=message.tokenizer_json,
        chat_template=message.chat_template,
        bos_token=message.bos_token,
        eos_token=message.eos_token,
        add_bos=message.add_bos,
        eos_token_ids=frozenset(message.eos_token_ids),
        generation_defaults=dict(message.generation_defaults),
    )


def decode_heartbeat(status: pb.GetStatusResponse) -> Heartbeat:
    """The executor's current state."""
    cache = status.cache
    return Heartbeat(
        epoch=status.epoch,
        phase=_PHASES.get(status.state),
        loading=status.loading,
        load_fraction=status.load_fraction,
        step_age_s=status.step_age_s,
        total_pages=cache.total_pages,
        available_pages=min(cache.free_pages + cache.cached_pages, cache.total_pages),
    )


MAX_FINGERPRINT_BYTES = 64


def decode_adapter(message: pb.Adapter, name: str, path: str) -> ServedAdapter:
    """The adapter that was loaded under this name. Raises ValueError if its fingerprint can't be one."""
    if not 1 <= len(message.fingerprint) <= MAX_FINGERPRINT_BYTES:
        raise ValueError(f"an adapter's fingerprint has {len(message.fingerprint)} bytes")
    return ServedAdapter(name, path, message.fingerprint, message.rank, message.bytes)
