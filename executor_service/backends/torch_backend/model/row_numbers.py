"""Rows as int32 numbers, from which the other ranks' `HostRunner`s compute the same step.

Of a row the other ranks need its pages, the tokens that it feeds and the slot of its adapter. Only rank 0
samples and scores. Of sampling the others need one bit: whether rank 0 needs their largest logit alone (a
greedy row) or all of their logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_service.backends.base import ForwardRow, PromptOutputs
from executor_service.backends.torch_backend.model.runner import Numbers
from executor_service.backends.torch_backend.ops.sampler import is_greedy
from executor_service.contract.plan import OutputMode, Sampling

_GREEDY = Sampling()
_HEAD = 10  # numbers of a row, see `_head`
_NO_PROMPT = PromptOutputs()


def pack_rows(rows: Sequence[ForwardRow]) -> Numbers:
    """The number of rows; of each the numbers of `_head`; all tokens; all block tables."""
    heads = np.array([_head(row) for row in rows], np.int32)
    arrays = [np.array([len(rows)]), heads.ravel(), *(r.tokens for r in rows), *(r.block_table for r in rows)]
    return np.concatenate(arrays).astype(np.int32)


def unpack_rows(body: Numbers) -> list[ForwardRow]:
    """The rows as the other ranks need them: histories and sampling parameters are stand-ins.

    The body is not checked, since rank 0 wrote it.
    """
    count = int(body[0])
    first = 1 + _HEAD * count
    heads = body[1:first].reshape(count, _HEAD)
    ends = first + np.cumsum(np.concatenate([heads[:, 1], heads[:, 4]]))
    parts = np.split(body, [first, *ends])[1:]
    return [
        ForwardRow(
            start=int(start),
            tokens=tokens,
            history=tokens,
            prompt_length=0,
            block_table=table,
            outputs=int(outputs),
            output=OutputMode.SAMPLE if greedy else OutputMode.FULL,
            sampling=_GREEDY,
            slot=int(slot),
            prompt=_unpack_prompt(*prompt),
        )
        for (start, _, outputs, greedy, _, slot, *prompt), tokens, table in zip(
            heads, parts[:count], parts[count : 2 * count], strict=True
        )
    ]


def _head(row: ForwardRow) -> tuple[int, ...]:
    """Start, tokens, outputs, greedy, pages, slot; of its prompt: first target, targets, last, total."""
    prompt = row.prompt or _NO_PROMPT
    asked = prompt.first, len(prompt.targets), prompt.last, prompt.total
    return row.start, len(row.tokens), row.outputs, is_greedy(row), len(row.block_table), row.slot, *asked


def _unpack_prompt(first: int, targets: int, last: int, total: int) -> PromptOutputs | None:
    """What the row returns of its prompt; which tokens are scored, only rank 0 knows."""
    if not (targets or last or total):
        return None
    return PromptOutputs(int(first), np.zeros(targets, np.int32), bool(last), bool(total))
