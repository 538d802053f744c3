"""What the tokens of a row may be, before it is computed."""

from __future__ import annotations

from executor_service.contract.masks import Masks
from executor_service.contract.plan import TokenIds


def without_dead_ends(drafts: TokenIds, masks: Masks) -> tuple[TokenIds, Masks]:
    """Drafts and masks [1 + drafts, bytes] up to the first mask that allows no token; the first one does.

    That position would have no token to sample, so the draft that leads to it must not be accepted.
    """
    some = masks.any(axis=1)
    if some.all():
        return drafts, masks
    end = int(some.argmin())
    return drafts[: end - 1], masks[:end]
