"""The limits that GetInfo publishes. Every request is checked against them before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ADAPTER_RANK = 256
"""No executor offers more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths in tokens, sizes in bytes; the fields of the proto's `Limits`, and some of the model's."""

    vocab_size: int
    context_length: int
    page_size: int
    total_pages: int
    max_sequences: int
    max_rows: int
    max_step_tokens: int  # at least max_rows
    max_in_flight: int = 4
    max_piece_tokens: int = 2048  # fed in one forward; a longer step takes several
    max_drafts: int = 64
    max_steps: int = 64
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_stop_token_ids: int = 128
    max_full_logits_bytes: int = 16 << 20
    max_salt_bytes: int = 256
    max_label_bytes: int = 128
    max_sessions: int = 256
    max_sessions_per_caller: int = 64
    max_ops: int = 16_384  # of a step
    max_released_ids: int = 65_536  # in a step's releases, and of GetCaches
    max_message_bytes: int = 64 << 20
    max_queued_steps: int = 1024
    min_lease_ms: int = 500
    max_lease_ms: int = 3_600_000
    max_default_pages: int = 0  # of the session 0s of all callers together; 0: no bound
    max_default_sequences: int = 0
    max_grammar_bytes: int = 0  # 0: no grammars
    max_grammar_compile_fuel: int = 0
    max_grammar_step_fuel: int = 0
    max_adapters: int = 0  # 0: no adapters
    max_adapter_slots: int = 0
    max_adapter_rank: int = 0
    max_adapter_bytes: int = 0
    can_sample: bool = True  # rows may be of any OutputMode; else of NONE and HIDDEN alone
    can_score: bool = False  # Opening.scored_from
    hidden_size: int = 0  # of what OutputMode.HIDDEN brings back; 0: not offered
