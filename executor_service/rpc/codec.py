"""Protobuf to plan, result to protobuf; and every limit that a message alone can break.

A broken shape (array lengths that disagree, sums that don't match, a row the RPC does not take) and a
broken size refuse the whole step: `StepRefused`. A bad value refuses its row or op, which becomes a
`Refusal` in its own place. Nothing is allocated for either.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.limits import Limits
from executor_service.contract.plan import (
    CacheView,
    Fork,
    Op,
    Opening,
    OutputMode,
    Reason,
    Refusal,
    Release,
    Row,
    RowResult,
    Sampling,
    StepPlan,
    StepRefused,
    StepResult,
    TokenIds,
    Truncate,
)
from executor_service.rpc.errors import CODE_OF, WIRE_REASON

T = TypeVar("T", int, bool)

MAX_PENDING_SHOWN = 1024
"""Pending tokens that GetCaches shows of a cache."""

_UINT32_MAX = (1 << 32) - 1
_EMPTY: TokenIds = np.zeros(0, np.int32)
_OUTPUTS: dict[int, OutputMode] = {
    pb.OUTPUT_MODE_UNSPECIFIED: OutputMode.SAMPLE,
    pb.OUTPUT_MODE_SAMPLE: OutputMode.SAMPLE,
    pb.OUTPUT_MODE_TOP_K: OutputMode.TOP_K,
    pb.OUTPUT_MODE_FULL: OutputMode.FULL,
    pb.OUTPUT_MODE_NONE: OutputMode.NONE,
}


class Takes(enum.Flag):
    """What rows an RPC takes."""

    OPENINGS = enum.auto()
    DRAFTS = enum.auto()
    STEPS = enum.auto()
    NOTHING = enum.auto()  # a step without rows is fine
    ONE = enum.auto()  # exactly one row or opening
    ALL_DRAFTS = enum.auto()  # each row has drafts


PREFILL = Takes.OPENINGS | Takes.ONE
BATCH_PREFILL = Takes.OPENINGS
DECODE = Takes.STEPS | Takes.ONE
BATCH_DECODE = Takes.STEPS
UNIFIED = Takes.OPENINGS | Takes.DRAFTS | Takes.STEPS | Takes.NOTHING
VERIFY = Takes.DRAFTS | Takes.ALL_DRAFTS


def decode_step(step: pb.Step, limits: Limits, takes: Takes) -> StepPlan:
    """A token RPC's step. Raises StepRefused."""
    header, packed = step.header, step.rows
    count = len(packed.cache_ids)
    total = count + len(step.openings)
    if total > limits.max_rows:
        raise _oversized(f"rows.cache_ids: {total} rows and openings, at most {limits.max_rows} (max_rows)")
    if Takes.ONE in takes and total != 1:
        raise _refused(f"rows.cache_ids: exactly one row or opening, not {total}")
    if not total and Takes.NOTHING not in takes:
        raise _refused("rows.cache_ids: at least one row or opening")
    if step.openings and Takes.OPENINGS not in takes:
        raise _refused("openings: this RPC takes none")
    _check_ops(step.ops, limits)
    full_bytes = 0
    rows: tuple[Row | Refusal, ...] = ()
    if count or packed.ByteSize():
        rows = _rows(packed, count, limits, takes)
        full_bytes += sum(
            4 * limits.vocab_size * (1 + len(row.drafts))
            for row in rows
            if not isinstance(row, Refusal) and row.output is OutputMode.FULL
        )
    openings = tuple(_opening(f"openings[{i}]", opening, limits) for i, opening in enumerate(step.openings))
    full_bytes += sum(
        4 * limits.vocab_size
        for opening in openings
        if not isinstance(opening, Refusal) and opening.output is OutputMode.FULL
    )
    if full_bytes > limits.max_full_logits_bytes:
        raise _oversized(
            f"rows.outputs: {full_bytes} bytes of FULL output, at most {limits.max_full_logits_bytes} "
            "(max_full_logits_bytes)"
        )
    return StepPlan(
        session_id=header.session_id,
        step_id=header.step_id,
        epoch=header.epoch,
        digest=digest(step) if header.step_id else b"",
        ops=tuple(_op(f"ops[{i}]", op, limits) for i, op in enumerate(step.ops)),
        rows=rows,
        openings=openings,
    )


def decode_op(
    request: pb.TruncateKvRequest | pb.ReleaseCacheRequest | pb.ForkCacheRequest, limits: Limits
) -> StepPlan:
    """A unary op as a step without rows."""
    header = request.header
    if isinstance(request, pb.ReleaseCacheRequest):
        _check_released(len(request.release.cache_ids), limits)
    op: Op | Refusal
    if isinstance(request, pb.TruncateKvRequest):
        op = Truncate(request.truncate.cache_id, request.truncate.length)
    elif isinstance(request, pb.ReleaseCacheRequest):
        op = Release(tuple(request.release.cache_ids))
    else:
        op = _fork("fork", request.fork, limits)
    return StepPlan(
        header.session_id,
        header.step_id,
        header.epoch,
        digest(request) if header.step_id else b"",
        (op,),
    )


def decode_forward(
    request: pb.ForwardRequest, limits: Limits, hidden_size: int
) -> tuple[list[TokenIds], frozenset[str]]:
    """Forward's inputs and what is wanted of them. Raises StepRefused."""
    if not 1 <= len(request.inputs) <= limits.max_rows:
        raise _oversized(f"inputs: 1 to {limits.max_rows} (max_rows), not {len(request.inputs)}")
    names = {
        pb.FORWARD_OUTPUT_HIDDEN: "hidden",
        pb.FORWARD_OUTPUT_EMBEDDING: "embedding",
        pb.FORWARD_OUTPUT_LOGITS: "logits",
    }
    if not request.outputs or not all(output in names for output in request.outputs):
        raise _refused("outputs: at least one of HIDDEN, EMBEDDING and LOGITS, and nothing else")
    want = frozenset(names[output] for output in request.outputs)
    lengths = [len(item.tokens) for item in request.inputs]
    if sum(lengths) > limits.max_step_tokens:
        raise _oversized(f"inputs: {sum(lengths)} tokens, at most {limits.max_step_tokens} (max_step_tokens)")
    width = hidden_size * ("hidden" in want) + limits.vocab_size * ("logits" in want)
    size = 4 * (width * sum(lengths) + hidden_size * len(lengths) * ("embedding" in want))
    if size > limits.max_full_logits_bytes:
        raise _oversized(
            f"outputs: {size} bytes, at most {limits.max_full_logits_bytes} (max_full_logits_bytes)"
        )
    inputs = []
    for i, item in enumerate(request.inputs):
        tokens = _tokens(f"inputs[{i}].tokens", item.tokens, limits)
        if isinstance(tokens, Refusal):
            raise StepRefused(tokens.reason, tokens.message)
        inputs.append(tokens)
    return inputs, want


def digest(message: Message) -> bytes:
    """What a replay must match: the type and content of the request."""
    content = message.SerializeToString(deterministic=True)
    return hashlib.sha256(message.DESCRIPTOR.name.encode() + b"\0" + content).digest()


def _check_ops(ops: Items[pb.Op], limits: Limits) -> None:
    if len(ops) > limits.max_ops:
        raise _oversized(f"ops: at most {limits.max_ops}, has {len(ops)}")
    _check_released(sum(len(op.release.cache_ids) for op in ops), limits)


def _check_released(count: int, limits: Limits) -> None:
    if count > limits.max_released_ids:
        raise _oversized(f"release.cache_ids: at most {limits.max_released_ids} in a step, has {count}")


def _rows(packed: pb.Rows, count: int, limits: Limits, takes: Takes) -> tuple[Row | Refusal, ...]:
    ids, lengths = list(packed.cache_ids), list(packed.kv_lengths)
    if len(lengths) != count:
        raise _refused(f"rows.kv_lengths: {len(lengths)} entries for {count} rows")
    limit = _per_row("limits", packed.limits, count, 0)
    steps = _per_row("steps", packed.steps, count, 1)
    outputs = _per_row("outputs", packed.outputs, count, pb.OUTPUT_MODE_SAMPLE)
    top_ks = _per_row("top_ks", packed.top_ks, count, 0)
    bounds = _per_row("kv_length_bounds", packed.kv_length_bounds, count, False)
    tokens, bad_tokens = _ragged("tokens", packed.tokens, packed.token_counts, count, limits)
    drafts, bad_drafts = _ragged("drafts", packed.drafts, packed.draft_counts, count, limits)
    if packed.drafts and Takes.DRAFTS not in takes:
        raise _refused("rows.drafts: this RPC takes rows without drafts")
    if Takes.ALL_DRAFTS in takes and not all(len(row) for row in drafts):
        raise _refused("rows.draft_counts: this RPC takes rows with drafts only")
    if Takes.STEPS not in takes and any(number > 1 for number in steps):
        raise _refused("rows.steps: this RPC takes no rows with several steps")
    # The usual step says nothing about any of these: then every row is plain.
    special = (
        packed.steps or packed.outputs or packed.top_ks or packed.draft_counts or packed.kv_length_bounds
    )
    if not (special or bad_tokens):
        return tuple(
            Row(cache_id, length, given, _EMPTY, most)
            for cache_id, length, given, most in zip(ids, lengths, tokens, limit, strict=True)
        )
    rows: list[Row | Refusal] = []
    for i in range(count):
        bad = bad_tokens.get(i) or bad_drafts.get(i)
        bad = bad or _bad_row(i, steps[i], len(drafts[i]), outputs[i], top_ks[i], limits)
        if bounds[i] and len(tokens[i]):
            bad = bad or _invalid(f"rows.kv_length_bounds[{i}]: not with tokens of its own")
        rows.append(
            bad
            or Row(
                ids[i],
                lengths[i],
                tokens[i],
                drafts[i],
                limit[i],
                steps[i] or 1,
                _OUTPUTS[outputs[i]],
                top_ks[i],
                bounds[i],
            )
        )
    return tuple(rows)


def _bad_row(i: int, steps: int, drafts: int, output: int, top_k: int, limits: Limits) -> Refusal | None:
    if output not in _OUTPUTS:
        return _invalid(f"rows.outputs[{i}]: unknown mode {output}")
    if steps > limits.max_steps:
        return _too_large(f"rows.steps[{i}]: at most {limits.max_steps} (max_steps), is {steps}")
    if drafts > limits.max_drafts:
        return _too_large(f"rows.draft_counts[{i}]: at most {limits.max_drafts} (max_drafts), is {drafts}")
    if steps > 1 and drafts:
        return _invalid(f"rows.steps[{i}]: not with drafts")
    if steps > 1 and _OUTPUTS[output] is not OutputMode.SAMPLE:
        return _invalid(f"rows.steps[{i}]: only with OUTPUT_MODE_SAMPLE")
    return _bad_top_k(f"rows.top_ks[{i}]", output, top_k, limits)


def _bad_top_k(field: str, output: int, top_k: int, limits: Limits) -> Refusal | None:
    if output == pb.OUTPUT_MODE_TOP_K and not 1 <= top_k <= limits.max_logprobs:
        return _too_large(f"{field}: 1 to {limits.max_logprobs} (max_logprobs), is {top_k}")
    return None


def _per_row(name: str, packed: Items[T], count: int, default: T) -> list[T]:
    if not packed:
        return [default] * count
    if len(packed) != count:
        raise _refused(f"rows.{name}: {len(packed)} entries for {count} rows")
    return list(packed)


def _ragged(
    name: str, packed: Items[int], counts: Items[int], count: int, limits: Limits
) -> tuple[list[TokenIds], dict[int, Refusal]]:
    """Each row's ids out of one array, and the refusals of the rows that have one outside the vocabulary."""
    field = f"rows.{name[:-1]}_counts"
    if not counts:
        if packed:
            raise _refused(f"{field}: required with rows.{name}")
        return [_EMPTY] * count, {}
    if len(counts) != count:
        raise _refused(f"{field}: {len(counts)} entries for {count} rows")
    ends = list(accumulate(counts))
    if ends and ends[-1] != len(packed):
        raise _refused(f"{field}: they sum to {ends[-1]}, rows.{name} has {len(packed)} entries")
    most = max(limits.max_step_tokens, limits.context_length)
    if len(packed) > most:
        raise _oversized(f"rows.{name}: at most {most} in a step, has {len(packed)}")
    wide: NDArray[np.int64] = np.array(packed, np.int64)
    ids = wide.astype(np.int32)
    begins = [0, *ends[:-1]]
    bad: dict[int, Refusal] = {}
    if wide.size and int(wide.max()) >= limits.vocab_size:
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if end > begin and (worst := int(wide[begin:end].max())) >= limits.vocab_size:
                bad[i] = _invalid(f"rows.{name}[{i}]: ids below {limits.vocab_size}, has {worst}")
    return [ids[a:b] if b > a else _EMPTY for a, b in zip(begins, ends, strict=True)], bad


def _opening_tokens(field: str, opening: pb.Opening, limits: Limits) -> TokenIds | Refusal:
    packed = opening.packed_tokens
    if not packed:
        return _tokens(f"{field}.tokens", opening.tokens, limits)
    if opening.tokens:
        return _invalid(f"{field}.packed_tokens: not together with tokens")
    if len(packed) % 4:
        return _invalid(f"{field}.packed_tokens: 4 bytes for each id, has {len(packed)} bytes")
    return _tokens(f"{field}.packed_tokens", np.frombuffer(packed, "<u4"), limits)


def _tokens(field: str, packed: Items[int] | NDArray[np.uint32], limits: Limits) -> TokenIds | Refusal:
    """One whole input."""
    if not 1 <= len(packed) <= limits.context_length:
        return _too_large(f"{field}: 1 to {limits.context_length} ids (context_length), has {len(packed)}")
    wide = np.array(packed, np.int64)
    if (worst := int(wide.max())) >= limits.vocab_size:
        return _invalid(f"{field}: ids below {limits.vocab_size}, has {worst}")
    return wide.astype(np.int32)


def _opening(field: str, opening: pb.Opening, limits: Limits) -> Opening | Refusal:
    if opening.cache_id == 0:
        return _invalid(f"{field}.cache_id: must not be 0")
    tokens = _opening_tokens(field, opening, limits)
    if isinstance(tokens, Refusal):
        return tokens
    if opening.prompt_length > len(tokens):
        return _invalid(f"{field}.prompt_length: at most {len(tokens)}, is {opening.prompt_length}")
    if opening.output not in _OUTPUTS:
        return _invalid(f"{field}.output: unknown mode {opening.output}")
    if bad := _bad_top_k(f"{field}.top_k", opening.output, opening.top_k, limits):
        return bad
    if len(opening.salt) > limits.max_salt_bytes:
        return _too_large(f"{field}.salt: at most {limits.max_salt_bytes} bytes, has {len(opening.salt)}")
    sampling = decode_sampling(f"{field}.sampling", opening.sampling, limits)
    if isinstance(sampling, Refusal):
        return sampling
    return Opening(
        opening.cache_id,
        tokens,
        opening.prompt_length or len(tokens),
        opening.limit,
        sampling,
        _OUTPUTS[opening.output],
        opening.top_k,
        opening.salt,
    )


def _op(field: str, op: pb.Op, limits: Limits) -> Op | Refusal:
    which = op.WhichOneof("op")
    if which == "release":
        return Release(tuple(op.release.cache_ids))
    if which == "truncate":
        return Truncate(op.truncate.cache_id, op.truncate.length)
    if which == "fork":
        return _fork(f"{field}.fork", op.fork, limits)
    return _invalid(f"{field}: release, truncate or fork")


def _fork(field: str, fork: pb.Fork, limits: Limits) -> Fork | Refusal:
    if fork.cache_id == 0:
        return _invalid(f"{field}.cache_id: must not be 0")
    sampling = decode_sampling(f"{field}.sampling", fork.sampling, limits)
    if isinstance(sampling, Refusal):
        return sampling
    return Fork(fork.source_id, fork.cache_id, fork.length, sampling)


def decode_sampling(field: str, sampling: pb.Sampling, limits: Limits) -> Sampling | Refusal:
    """Sampling parameters, each within its range; a missing seed is drawn here."""
    ranges = (
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -100.0, 100.0),
        ("frequency_penalty", sampling.frequency_penalty, -100.0, 100.0),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # false for NaN too
            return _invalid(f"{field}.{name}: {low:g} to {high:g}, is {value:g}")
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        return _invalid(f"{field}.top_p: above 0 and up to 1, is {top_p:g}")
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 0 < repetition <= 100:
        return _invalid(f"{field}.repetition_penalty: above 0 and up to 100, is {repetition:g}")
    if len(sampling.logit_bias) > limits.max_logit_bias:
        return _too_large(
            f"{field}.logit_bias: at most {limits.max_logit_bias} entries (max_logit_bias), "
            f"has {len(sampling.logit_bias)}"
        )
    bias = tuple(sorted(sampling.logit_bias.items()))
    for token, value in bias:
        if token >= limits.vocab_size:
            return _invalid(f"{field}.logit_bias: ids below {limits.vocab_size}, has {token}")
        if not -1000 <= value <= 1000:
            return _invalid(f"{field}.logit_bias[{token}]: -1000 to 1000, is {value:g}")
    stops = tuple(sampling.stop_token_ids)
    if len(stops) > limits.max_stop_token_ids:
        return _too_large(
            f"{field}.stop_token_ids: at most {limits.max_stop_token_ids} (max_stop_token_ids), "
            f"has {len(stops)}"
        )
    if stops and max(stops) >= limits.vocab_size:
        return _invalid(f"{field}.stop_token_ids: ids below {limits.vocab_size}, has {max(stops)}")
    logprobs = sampling.logprobs if sampling.HasField("logprobs") else None
    if logprobs is not None and logprobs > limits.max_logprobs:
        return _too_large(f"{field}.logprobs: at most {limits.max_logprobs} (max_logprobs), is {logprobs}")
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.top_k < limits.vocab_size else 0,
        top_p=top_p,
        min_p=sampling.min_p,
        repetition_penalty=repetition,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=bias,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        logprobs=logprobs,
        stop_token_ids=stops,
        min_tokens=sampling.min_tokens,
    )


def encode_result(message: pb.StepResult, result: StepResult, plan: StepPlan, epoch: int) -> None:
    """Fill a step's reply, in place: copying it into its response would cost as much again."""
    message.step_id = plan.step_id
    message.epoch = epoch
    message.free_pages = result.free_pages
    message.evictable_pages = result.evictable_pages
    message.queue_us = min(result.queue_us, _UINT32_MAX)
    message.compute_us = min(result.compute_us, _UINT32_MAX)
    if result.rows:
        rows = message.rows
        results = result.rows
        rows.kv_lengths.extend([row.kv_length for row in results])
        rows.token_counts.extend([len(row.tokens) for row in results])
        rows.tokens.extend([token for row in results for token in row.tokens])
        rows.cached_lengths.extend([row.cached_length for row in results[len(plan.rows) :]])
        for index, row in enumerate(results):
            if row.refusal is not None:
                rows.errors.append(encode_error(row.refusal, index))
            elif row.logprobs is not None or row.top_ids is not None or row.logits is not None:
                rows.details.append(_detail(index, row))
    for index, op in enumerate(result.ops):
        message.ops.add(kv_length=op.kv_length, released=op.released)
        if op.refusal is not None:
            message.op_errors.append(encode_error(op.refusal, index))


def encode_caches(views: Items[CacheView], last_step_id: int, epoch: int) -> pb.GetCachesResponse:
    """GetCaches' reply."""
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
    """A refusal as a value."""
    return pb.Error(
        index=index,
        code=CODE_OF[refusal.reason],
        message=refusal.message,
        reason=WIRE_REASON[refusal.reason],
        kv_length=refusal.kv_length,
    )


def encode_tensor(array: NDArray[np.float32]) -> pb.Tensor:
    """Little-endian fp32, row-major."""
    return pb.Tensor(shape=array.shape, data=np.ascontiguousarray(array, "<f4").tobytes())


def _detail(index: int, row: RowResult) -> pb.RowDetail:
    detail = pb.RowDetail(row=index)
    if row.logprobs is not None:
        detail.logprobs.extend(row.logprobs.tolist())
    if row.top_ids is not None and row.top_logprobs is not None:
        detail.k = row.top_ids.shape[1]
        detail.top_ids.extend(row.top_ids.ravel().tolist())
        detail.top_logprobs.extend(row.top_logprobs.ravel().tolist())
    if row.logits is not None:
        detail.logits.CopyFrom(encode_tensor(row.logits))
    return detail


def _invalid(message: str) -> Refusal:
    return Refusal(Reason.INVALID, message)


def _refused(message: str) -> StepRefused:
    return StepRefused(Reason.INVALID, message)


def _too_large(message: str) -> Refusal:
    return Refusal(Reason.TOO_LARGE, message)


def _oversized(message: str) -> StepRefused:
    return StepRefused(Reason.TOO_LARGE, message)
