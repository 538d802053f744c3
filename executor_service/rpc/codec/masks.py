"""Masks of rows and openings: what they may sample."""

from __future__ import annotations

from executor_service.contract.limits import Limits
from executor_service.contract.masks import Masks, mask_bytes, read_masks
from executor_service.contract.plan import OutputMode, Refusal
from executor_service.rpc.codec.refusals import invalid


def decode_masks(
    field: str, packed: bytes, positions: int, output: OutputMode, limits: Limits, steps: int = 1
) -> Masks | Refusal | None:
    """The masks of one row's `positions`, [positions, bytes]; None: it has none."""
    if not packed:
        return None
    if output is not OutputMode.SAMPLE:
        return invalid(f"{field}: only with OUTPUT_MODE_SAMPLE")
    if steps > 1:
        return invalid(f"{field}: not with several steps")
    expected = positions * mask_bytes(limits.vocab_size)
    if len(packed) != expected:
        return invalid(
            f"{field}: {expected} bytes, {mask_bytes(limits.vocab_size)} for each of {positions} positions, "
            f"has {len(packed)}"
        )
    masks = read_masks(packed, positions, limits.vocab_size)
    if not masks[0].any():
        return invalid(f"{field}: the first mask allows no token")
    return masks
