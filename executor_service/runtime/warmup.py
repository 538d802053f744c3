"""Runs the shapes that compile or allocate lazily. They use the scratch page, so no KV changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from executor_service.backends.base import Backend, ForwardRow
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Abandoned, Forwards, OutputMode, Sampling

_SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.95), Sampling(temperature=1.0, logprobs=1))
_CHUNK_TOKENS = 128
_LARGEST_BATCH = 64


def warm_up(backend: Backend, limits: Limits) -> Forwards[None]:
    """One forward for each batch size 1, 2, 4, ... and sampling path, and a prompt chunk with decodes.

    Raises Abandoned when no client waits any more.
    """
    for rows in _forwards(limits):
        if not (yield):
            raise Abandoned
        backend.forward(rows)


def _forwards(limits: Limits) -> Iterator[list[ForwardRow]]:
    chunk, page_size = min(_CHUNK_TOKENS, limits.context_length, limits.max_step_tokens), limits.page_size
    for sampling in _SAMPLINGS:
        yield [_row(chunk, 0, page_size, sampling)]
    for rows in _batch_sizes(limits):
        for sampling in _SAMPLINGS:
            yield [_row(1, chunk - 1, page_size, sampling) for _ in range(rows)]
    if limits.max_rows > 1 and limits.max_step_tokens > chunk:
        mixed = (chunk, 0), (1, chunk - 1)
        yield [_row(tokens, start, page_size, Sampling()) for tokens, start in mixed]


def _batch_sizes(limits: Limits) -> Iterator[int]:
    size = 1
    while size <= min(limits.max_rows, limits.max_step_tokens, _LARGEST_BATCH):
        yield size
        size *= 2


def _row(tokens: int, start: int, page_size: int, sampling: Sampling) -> ForwardRow:
    end = start + tokens
    history = np.zeros(end, np.int32)
    scratch = np.zeros(-(-end // page_size), np.int32)
    return ForwardRow(start, history[start:], history, end, scratch, 1, OutputMode.SAMPLE, sampling)
