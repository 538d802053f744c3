"""Masks of rows: caught by test_masks.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from executor_service.backends import numpy_sampler
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def mask_one_position_late() -> None:
    """a position samples under the mask of the one before it"""

    def sample(original: Any, logits: Any, row: Any) -> Any:
        if row.masks is not None:
            row = replace(row, masks=np.concatenate([row.masks[:1], row.masks[:-1]]))
        return original(logits, row)

    wrap(numpy_sampler, "sample", sample)


@mutant()
def mask_forgotten_in_verification() -> None:
    """rows with drafts sample as if they had no masks"""

    def sample(original: Any, logits: Any, row: Any) -> Any:
        if row.masks is not None and row.outputs > 1:
            row = replace(row, masks=None)
        return original(logits, row)

    wrap(numpy_sampler, "sample", sample)
