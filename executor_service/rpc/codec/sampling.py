"""Sampling parameters, each within its range."""

from __future__ import annotations

import secrets

from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.grammar import Grammar
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Refusal, Sampling
from executor_service.rpc.codec.grammars import NO_GRAMMARS, CompiledGrammars, compiled_grammar
from executor_service.rpc.codec.refusals import invalid, too_large


def decode_sampling(
    field: str, sampling: pb.Sampling, limits: Limits, compiled: CompiledGrammars = NO_GRAMMARS
) -> Sampling | Refusal:
    """Sampling parameters, each within its range; a missing seed is drawn here."""
    grammar: Grammar | None = None
    if sampling.HasField("grammar"):
        found = compiled_grammar(f"{field}.grammar", sampling.grammar, limits, compiled)
        if isinstance(found, Refusal):
            return found
        grammar = found
    ranges = (
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -100.0, 100.0),
        ("frequency_penalty", sampling.frequency_penalty, -100.0, 100.0),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # false for NaN too
            return invalid(f"{field}.{name}: {low:g} to {high:g}, is {value:g}")
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        return invalid(f"{field}.top_p: above 0 and up to 1, is {top_p:g}")
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 0 < repetition <= 100:
        return invalid(f"{field}.repetition_penalty: above 0 and up to 100, is {repetition:g}")
    if len(sampling.logit_bias) > limits.max_logit_bias:
        return too_large(
            f"{field}.logit_bias: at most {limits.max_logit_bias} entries (max_logit_bias), "
            f"has {len(sampling.logit_bias)}"
        )
    bias = tuple(sorted(sampling.logit_bias.items()))
    for token, value in bias:
        if token >= limits.vocab_size:
            return invalid(f"{field}.logit_bias: ids below {limits.vocab_size}, has {token}")
        if not -1000 <= value <= 1000:
            return invalid(f"{field}.logit_bias[{token}]: -1000 to 1000, is {value:g}")
    stops = tuple(sampling.stop_token_ids)
    if len(stops) > limits.max_stop_token_ids:
        return too_large(
            f"{field}.stop_token_ids: at most {limits.max_stop_token_ids} (max_stop_token_ids), "
            f"has {len(stops)}"
        )
    if stops and max(stops) >= limits.vocab_size:
        return invalid(f"{field}.stop_token_ids: ids below {limits.vocab_size}, has {max(stops)}")
    logprobs = sampling.logprobs if sampling.HasField("logprobs") else None
    if logprobs is not None and logprobs > limits.max_logprobs:
        return too_large(f"{field}.logprobs: at most {limits.max_logprobs} (max_logprobs), is {logprobs}")
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.top_k < limits.vocab_size else 0,
        top_p=top_p,
        min_p=sampling.min_p,
        repetition_penalty=repetition,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=bias,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        logprobs=logprobs,
        stop_token_ids=stops,
        min_tokens=sampling.min_tokens,
        grammar=grammar,
    )
