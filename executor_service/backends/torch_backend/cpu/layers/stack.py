"""`CpuStack`: all blocks of a model as one table of jobs, so that a small step costs Python one call.

Between two calls Python takes some 10 us, and more where its own code has left the caches or other threads
want the interpreter; with 8 calls a block that was a third of a step of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from executor_service.backends.torch_backend.cpu.layers.threaded_linear import PooledGated, PooledLinear
from executor_service.backends.torch_backend.cpu.primitives.chunks import ROWS_AT_ONCE
from executor_service.backends.torch_backend.cpu.threads import jobs as cpu_jobs
from executor_service.backends.torch_backend.cpu.threads.jobs import BATCH, CHUNKS, KIND, PAGE_SIZE, ROWS, Job
from executor_service.backends.torch_backend.cpu.threads.thread_pool import Pool
from executor_service.backends.torch_backend.kernels import AttentionWeights, Block, LayerCache

_MOST_TOKENS = 256  # of a step in which Python's part shows
_Cached = tuple[int, int, int, int, int]  # the columns of a job from BATCH to PAGE_SIZE


@dataclass(frozen=True, slots=True)
class CpuBatch:
    """A batch as `attention.attend_chunk` reads it."""

    address: int
    items: int
    keep: tuple[object, ...]  # what lies there


def norm_job(rows: int, x: int, weight: torch.Tensor, out: int, eps: float) -> Job:
    """RMSNorm of rows at address x."""
    bits = np.float32(eps).view(np.int32).item()
    return cpu_jobs.by_rows(cpu_jobs.NORM, rows, x, weight.data_ptr(), out, len(weight), bits)


def cached(batch: CpuBatch, cache: LayerCache) -> _Cached:
    """What jobs of attention know of a batch and its pages."""
    k, v = cache.k, cache.v
    return batch.address, k.data_ptr(), v.data_ptr(), v.itemsize, v.shape[3]


def attention_jobs(
    tokens: int, items: int, on: _Cached, qkv: int, out: int, w: AttentionWeights
) -> tuple[Job, Job]:
    """Norm and rotation of q and k, with the write of k and v; and attention to what is written."""
    shape = w.kv_heads, w.heads // w.kv_heads, w.head_dim
    eps = np.float32(w.eps).view(np.int32).item()
    return (
        cpu_jobs.by_rows(
            cpu_jobs.ROTATE, tokens, *on, qkv, *shape, w.cos.data_ptr(), w.sin.data_ptr(), len(w.cos),
            w.q_norm.data_ptr(), w.k_norm.data_ptr(), len(w.q_norm), eps,
        ),
        (cpu_jobs.ATTEND, items * w.kv_heads, tokens, *on, qkv, *shape, out),
    )  # fmt: skip


class CpuStack:
    """A table that serves every batch of up to `most_tokens` tokens: what differs is a few of its columns."""

    most_tokens = _MOST_TOKENS

    def __init__(self, pool: Pool, rooms: Sequence[torch.Tensor], jobs: Sequence[Job], keep: object) -> None:
        """Jobs that turn the first room, [most_tokens, hidden], into what follows the last block, in place.

        `rooms` and `keep` are all that they have the addresses of. A block has one job of ATTEND.
        """
        self._pool, self._rooms, self._keep = pool, rooms, keep
        self._jobs = cpu_jobs.table(jobs)
        kinds = self._jobs[:, KIND]
        self._by_rows = np.flatnonzero(np.isin(kinds, cpu_jobs.BY_ROWS))
        self._rotates = np.flatnonzero(kinds == cpu_jobs.ROTATE)
        self._attends = np.flatnonzero(kinds == cpu_jobs.ATTEND)

    def __call__(self, x: torch.Tensor, prepared: CpuBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """See `Stack`."""
        tokens, jobs, result = len(x), self._jobs, self._rooms[0][: len(x)]
        result.copy_(x)
        jobs[:, ROWS] = tokens
        jobs[self._by_rows, CHUNKS] = -(-tokens // ROWS_AT_ONCE)
        jobs[self._attends, CHUNKS] = prepared.items * caches[0].k.shape[1]
        on = np.array([cached(prepared, cache) for cache in caches], np.int64)
        jobs[self._rotates, BATCH : PAGE_SIZE + 1] = on
        jobs[self._attends, BATCH : PAGE_SIZE + 1] = on
        self._pool.run_table(jobs)
        return result


def stacked(pool: Pool, blocks: Sequence[Block], eps: float) -> CpuStack | None:
    """The blocks, all of one shape, as a stack, if their products are of those that jobs do."""
    rows, first = _MOST_TOKENS, blocks[0]
    hidden, w = len(first.attention_norm), first.attention
    if not isinstance(first.gated, PooledGated):
        return None
    widths = hidden, hidden, (w.heads + 2 * w.kv_heads) * w.head_dim, w.heads * w.head_dim, first.gated.width
    rooms = [torch.empty(rows, width) for width in widths]
    x, normed, qkv, attended, inner = (room.data_ptr() for room in rooms)
    jobs: list[Job] = []
    for b in blocks:
        if not isinstance(b.qkv, PooledLinear) or not isinstance(b.output, PooledLinear):
            return None
        if not isinstance(b.gated, PooledGated) or not isinstance(b.down, PooledLinear):
            return None
        jobs += [norm_job(rows, x, b.attention_norm, normed, eps), *b.qkv.jobs(rows, normed, qkv, False)]
        jobs += attention_jobs(rows, 1, (0, 0, 0, 0, 0), qkv, attended, b.attention)
        jobs += b.output.jobs(rows, attended, x, True)
        jobs += [norm_job(rows, x, b.mlp_norm, normed, eps), *b.gated.jobs(rows, normed, inner)]
        jobs += b.down.jobs(rows, inner, x, True)
    return CpuStack(pool, rooms, jobs, blocks)
