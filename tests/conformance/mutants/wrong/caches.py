"""Owners, upper bounds, GetCaches and packed prompts: caught by test_caches.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from executor_service.cache.session import Sessions
from executor_service.contract.plan import Refusal
from executor_service.rpc import servicer
from executor_service.rpc.codec import rows as rows_codec
from executor_service.steps.engine import Engine
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def owner_ignored() -> None:
    """a restarted client's former session keeps its pages until its lease ends"""
    wrap(Sessions, "owned_by", lambda original, self, owner, caller: None)


@mutant()
def upper_bound_taken_for_the_length() -> None:
    """a row that gives an upper bound of its KV length is refused as if it were the length"""

    def decode_step(original: Any, *args: Any) -> Any:
        plan = original(*args)
        for row in plan.rows:
            if not isinstance(row, Refusal):
                row.is_bound = False
        return plan

    wrap(servicer, "decode_step", decode_step)


@mutant()
def pending_tokens_forgotten() -> None:
    """GetCaches leaves out what is pending"""

    def look(original: Any, *args: Any) -> Any:
        last_step_id, views = original(*args)
        return last_step_id, [replace(view, pending=view.pending[:0]) for view in views]

    wrap(Engine, "look", look)


@mutant()
def packed_prompt_read_big_endian() -> None:
    """the bytes of a packed prompt are taken in the wrong order"""

    def opening_tokens(original: Any, field: str, opening: Any, limits: Any) -> Any:
        packed = opening.packed_tokens
        if packed and len(packed) % 4 == 0:
            opening.packed_tokens = np.frombuffer(packed, ">u4").astype("<u4").tobytes()
        return original(field, opening, limits)

    wrap(rows_codec, "opening_tokens", opening_tokens)
