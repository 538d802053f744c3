"""A small model to check requests against."""

from __future__ import annotations

from scheduler_service.model import DraftingOffer, Fingerprints, RequestAllowance, ServedModel, TokenSpace

LIMITS = RequestAllowance(
    max_n=4,
    max_stop_strings=4,
    max_stop_string_bytes=16,
    max_stop_token_ids=4,
    max_logit_bias=4,
    max_logprobs=5,
    max_prompt_bytes=1000,
)
MODEL = ServedModel(
    fingerprints=Fingerprints(b"model", "sampler-1"),
    vocabulary=TokenSpace(b"words", 100, "sampler-1"),
    name="small",
    architecture="oracle",
    dtype="float32",
    version="0",
    vocab_size=100,
    context_length=64,
    eos_token_ids=frozenset({0}),
    limits=LIMITS,
    max_draft_tokens=16,
    generation_defaults={"temperature": 0.5, "top_k": 7.0},
)
DRAFTING = DraftingOffer()
