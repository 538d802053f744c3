"""Results of steps, states of caches, and refusals, as messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.plan import CacheView, Refusal, RowResult, StepPlan, StepResult
from executor_service.rpc.codec.forward import encode_tensor
from executor_service.rpc.errors import CODE_OF, WIRE_REASON

MAX_PENDING_SHOWN = 1024
"""Pending tokens in a reply of GetCaches, for each cache."""

_UINT32_MAX = (1 << 32) - 1


def encode_result(message: pb.StepResult, result: StepResult, plan: StepPlan, epoch: int) -> None:
    """Fill the reply of a step in place; copying it into its response would double the cost."""
    message.step_id = plan.step_id
    message.epoch = epoch
    message.free_pages = result.free_pages
    message.evictable_pages = result.evictable_pages
    message.queue_us = min(result.queue_us, _UINT32_MAX)
    message.compute_us = min(result.compute_us, _UINT32_MAX)
    if result.rows:
        rows = message.rows
        results = result.rows
        rows.kv_lengths.extend(results.kv_lengths)
        rows.token_counts.extend(list(map(len, results.tokens)))
        rows.tokens.extend(list(chain.from_iterable(results.tokens)))
        rows.cached_lengths.extend([row.cached_length for row in results[len(plan.rows) :]])
        for index, row in sorted(results.others.items()):
            if row.refusal is not None:
                rows.errors.append(encode_error(row.refusal, index))
            elif _has_detail(row):
                rows.details.append(_detail(index, row))
    for index, op in enumerate(result.ops):
        message.ops.add(kv_length=op.kv_length, released=op.released)
        if op.refusal is not None:
            message.op_errors.append(encode_error(op.refusal, index))


def encode_caches(views: Sequence[CacheView], last_step_id: int, epoch: int) -> pb.GetCachesResponse:
    """The reply of GetCaches."""
    return pb.GetCachesResponse(
        epoch=epoch,
        last_step_id=last_step_id,
        caches=[
            pb.Cache(
                cache_id=view.cache_id,
                kv_length=view.kv_length,
                pending_tokens=view.pending[:MAX_PENDING_SHOWN].tolist(),
                pending_count=len(view.pending),
                prompt_length=view.prompt_length,
                pages=view.pages,
            )
            for view in views
        ],
    )


def encode_error(refusal: Refusal, index: int = 0) -> pb.Error:
    """The error of a row or op; `index`: its place in the step."""
    return pb.Error(
        index=index,
        code=CODE_OF[refusal.reason],
        message=refusal.message,
        reason=WIRE_REASON[refusal.reason],
        kv_length=refusal.kv_length,
    )


def _has_detail(row: RowResult) -> bool:
    return (
        row.logprobs is not None
        or row.top_ids is not None
        or row.logits is not None
        or row.scores is not None
        or row.hidden is not None
        or bool(row.forced)
    )


def _detail(index: int, row: RowResult) -> pb.RowDetail:
    detail = pb.RowDetail(row=index, forced_tokens=row.forced)
    if row.logprobs is not None:
        detail.logprobs.extend(row.logprobs.tolist())
    if row.top_ids is not None and row.top_logprobs is not None:
        detail.k = row.top_ids.shape[1]
        detail.top_ids.extend(row.top_ids.ravel().tolist())
        detail.top_logprobs.extend(row.top_logprobs.ravel().tolist())
    if row.logits is not None:
        detail.logits.CopyFrom(encode_tensor(row.logits))
    if row.scores is not None:
        scores = row.scores
        detail.scores.first = scores.first
        detail.scores.logprobs.extend(scores.logprobs.tolist())
        detail.scores.k = scores.top_ids.shape[1]
        detail.scores.top_ids.extend(scores.top_ids.ravel().tolist())
        detail.scores.top_logprobs.extend(scores.top_logprobs.ravel().tolist())
    if row.hidden is not None:
        detail.hidden.CopyFrom(encode_tensor(row.hidden))
    return detail
