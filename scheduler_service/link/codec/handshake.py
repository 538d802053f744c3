"""GetInfo and GetTokenizer to what the scheduler knows of an executor."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.executor.v1 import executor_pb2 as pb
from paceline.service.logs import Log

from scheduler_service.core.ranges import RANGES
from scheduler_service.core.step import Capacity
from scheduler_service.link.codec.foreign import brief
from scheduler_service.link.codec.steps import Bounds
from scheduler_service.model import Identity, Model, RequestLimits, TokenizerFiles, Vocabulary

log = Log(__name__)


def decode_identity(info: pb.GetInfoResponse) -> Identity:
    """What failover demands to be equal."""
    return Identity(model=info.fingerprints.model, sampler=info.fingerprints.sampler)


def decode_vocabulary(info: pb.GetInfoResponse) -> Vocabulary:
    """What drafting demands to be equal."""
    prints = info.fingerprints
    return Vocabulary(fingerprint=prints.vocabulary, size=info.model.vocab_size, sampler=prints.sampler)


def decode_capacity(info: pb.GetInfoResponse) -> Capacity:
    """What the executor can hold, in sequences, pages and tokens. Raises ValueError if that is nothing."""
    limits = info.limits
    capacity = Capacity(
        total_pages=limits.total_pages,
        page_size=limits.page_size,
        context_length=info.model.context_length,
        max_sequences=limits.max_sequences,
        max_rows=limits.max_rows,
        max_step_tokens=limits.max_step_tokens,
        max_drafts=_max_drafts(info),
        max_steps=max(1, limits.max_steps) if pb.CAPABILITY_MULTI_STEP in info.capabilities else 1,
        max_in_flight=max(1, limits.max_in_flight),
        steps_to_be_busy=2 if info.model.device.startswith("cuda") else 1,
    )
    for name in capacity.__slots__:
        if getattr(capacity, name) < 1 and name != "max_drafts":
            raise ValueError(f"the executor's {name} is {getattr(capacity, name)}")
    return capacity


def decode_bounds(info: pb.GetInfoResponse) -> Bounds:
    """What its answers are checked against. Raises ValueError without a vocabulary."""
    if info.model.vocab_size < 1:
        raise ValueError("the executor's vocab_size is 0")
    return Bounds(info.model.vocab_size, info.model.context_length, info.limits.total_pages)


def _max_drafts(info: pb.GetInfoResponse) -> int:
    return info.limits.max_drafts if pb.CAPABILITY_VERIFY in info.capabilities else 0


def decode_model(info: pb.GetInfoResponse, tokenizer: pb.GetTokenizerResponse, own: RequestLimits) -> Model:
    """The model, with the settings' limits narrowed to what this executor takes.

    Raises ValueError if it has more end tokens than a step may carry: no request could be computed.
    """
    limits, eos = info.limits, _end_tokens(info, tokenizer)
    if len(eos) > limits.max_stop_token_ids:
        raise ValueError(
            f"the executor's model has {len(eos)} end tokens, but its max_stop_token_ids is "
            f"{limits.max_stop_token_ids}"
        )
    can_fork = pb.CAPABILITY_FORK in info.capabilities
    return Model(
        identity=decode_identity(info),
        vocabulary=decode_vocabulary(info),
        name=brief(info.model.name),
        architecture=brief(info.model.architecture),
        dtype=brief(info.model.dtype),
        version=brief(info.version),
        vocab_size=info.model.vocab_size,
        context_length=info.model.context_length,
        eos_token_ids=eos,
        limits=RequestLimits(
            max_n=min(own.max_n, limits.max_sequences) if can_fork else 1,
            max_stop_strings=own.max_stop_strings,
            max_stop_string_bytes=own.max_stop_string_bytes,
            # end tokens travel beside them, to be masked until min_tokens
            max_stop_token_ids=max(0, min(own.max_stop_token_ids, limits.max_stop_token_ids - len(eos))),
            max_logit_bias=min(own.max_logit_bias, limits.max_logit_bias),
            max_logprobs=min(own.max_logprobs, limits.max_logprobs),
            max_prompt_bytes=own.max_prompt_bytes,
        ),
        max_draft_tokens=_max_drafts(info),
        generation_defaults=_generation_defaults(tokenizer.generation_defaults),
    )


def _end_tokens(info: pb.GetInfoResponse, tokenizer: pb.GetTokenizerResponse) -> frozenset[int]:
    """Ids outside of the vocabulary are never sampled, and executors refuse steps that carry them."""
    given = frozenset(info.model.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
    known = frozenset(id_ for id_ in given if id_ < info.model.vocab_size)
    if known != given:
        outside, size = sorted(given - known)[:8], info.model.vocab_size
        log.warning("end tokens outside of the vocabulary ignored", ids=outside, vocab_size=size)
    return known


def _generation_defaults(given: Mapping[str, float]) -> dict[str, float]:
    """Those that requests may have: another would make each request fail that does not say its own."""
    defaults = {}
    for key, value in given.items():
        if key not in RANGES:
            continue
        if value in RANGES[key]:
            defaults[key] = value
        else:
            log.warning("sampling default ignored", key=key, value=value, range=str(RANGES[key]))
    return defaults


def decode_tokenizer(message: pb.GetTokenizerResponse) -> TokenizerFiles:
    """The files for `text.TextTools`."""
    return TokenizerFiles(
        tokenizer_json=message.tokenizer_json,
        chat_template=message.chat_template,
        bos_token=message.bos_token,
        eos_token=message.eos_token,
        add_bos=message.add_bos,
    )
