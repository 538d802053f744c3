"""What the device finds out for a row that follows one of the launch before: its start and its first token.

For backends that compute on the host; on CUDA the same is done by kernels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.contract.masks import Masks
from executor_service.contract.plan import TokenIds

_NO_TOKEN = 0  # input of a row after one that is not finite


def accepted_drafts(drafts: TokenIds, sampled: TokenIds) -> int:
    """How many drafts are accepted: the longest prefix that equals what was sampled in their places.

    sampled: [drafts + 1]; sampled[i] is what follows drafts[:i].
    """
    wrong = np.flatnonzero(sampled[:-1] != drafts)
    return int(wrong[0]) if wrong.size else len(drafts)


def resolved(row: ForwardRow, former: ForwardRow, output: RowOutput) -> ForwardRow:
    """The row, now that `former`, which it follows, has this output; `former` is resolved itself."""
    drafts = former.outputs - 1
    token, kept = _NO_TOKEN, drafts
    if output.tokens is not None:
        kept = accepted_drafts(former.tokens[len(former.tokens) - drafts :], output.tokens)
        token = int(output.tokens[kept])
    start = former.start + len(former.tokens) - drafts + kept
    history = np.concatenate([former.history[:start], np.array([token], np.int32), row.tokens[1:]])
    return replace(row, start=start, tokens=history[start:], history=history, follows=-1, slack=0)


def mask_late(row: ForwardRow, masks: Masks | None) -> int:
    """Give a row that is `masked_later` its masks; returns how many of its last outputs are dropped."""
    dropped = 0 if masks is None else row.outputs - len(masks)
    if dropped:
        row.outputs -= dropped
        row.tokens, row.history = row.tokens[:-dropped], row.history[:-dropped]
    row.masks, row.masked_later = masks, False
    return dropped
