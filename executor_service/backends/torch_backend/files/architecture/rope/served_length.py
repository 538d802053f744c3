"""What a rotary embedding that depends on a length is for a served context, in words for the log."""

from __future__ import annotations

from dataclasses import dataclass

from executor_service.backends.torch_backend.files.architecture.rope.spec import (
    DynamicNtk,
    LongRope,
    RopeSpec,
)


@dataclass(frozen=True, slots=True)
class ServedLength:
    """Which frequencies all tokens have, whatever their sequence's length."""

    used: str
    change: str  # what another `max_context` would change
    differs: bool  # from transformers, for prompts up to the trained length


def served_length(rope: RopeSpec, context: int, longest: int) -> ServedLength | None:
    """For a served context of `context` tokens, of at most `longest`; None: no length decides anything."""
    match rope.scaling:
        case LongRope(original_context=trained):
            scaled, plain = "longrope, long factors", "longrope, short factors"
        case DynamicNtk(trained_context=trained):
            scaled, plain = f"dynamic NTK for {max(context, trained)} tokens", "dynamic NTK, not scaled"
        case _:
            return None
    if longest <= trained:
        return None
    if context > trained:
        change = f"-E max-context={trained}: {plain}, as transformers has it for prompts up to this length"
        return ServedLength(scaled, change, differs=True)
    change = f"-E max-context= above {trained}, up to {longest}: scaled, for longer prompts"
    return ServedLength(plain, change, differs=False)
