"""Steps: the header, the ops, and what holds for all rows together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from google.protobuf.message import Message
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.limits import Limits
from executor_service.contract.plan import (
    NO_ROWS,
    Fork,
    Op,
    OutputMode,
    Refusal,
    Release,
    StepPlan,
    Truncate,
)
from executor_service.rpc.codec.grammars import NO_GRAMMARS, CompiledGrammars
from executor_service.rpc.codec.refusals import invalid, oversized, refused
from executor_service.rpc.codec.rows import Takes, decode_opening, decode_rows
from executor_service.rpc.codec.sampling import decode_sampling

MAX_TRACEPARENT_BYTES = 128


def decode_step(
    step: pb.Step, limits: Limits, takes: Takes, compiled: CompiledGrammars = NO_GRAMMARS
) -> StepPlan:
    """The step of a token RPC that takes such rows, its grammars compiled. Raises RequestRefused."""
    header, packed = step.header, step.rows
    _check_header(header)
    count = len(packed.cache_ids)
    total = count + len(step.openings)
    if total > limits.max_rows:
        raise oversized(f"rows.cache_ids: {total} rows and openings, at most {limits.max_rows} (max_rows)")
    if total != 1 and Takes.ONE in takes:
        raise refused(f"rows.cache_ids: exactly one row or opening, not {total}")
    if not total and Takes.NOTHING not in takes:
        raise refused("rows.cache_ids: at least one row or opening")
    if step.openings and Takes.OPENINGS not in takes:
        raise refused("openings: this RPC takes none")
    _check_ops(step.ops, limits)
    full_bytes = 0
    rows = decode_rows(packed, count, limits, takes) if count or packed.ByteSize() else NO_ROWS
    if packed.outputs:
        full_bytes += sum(
            _array_bytes(row.output, 1 + len(row.drafts), limits)
            for row in rows.others.values()
            if not isinstance(row, Refusal) and row.output is not OutputMode.SAMPLE
        )
    openings = tuple(
        decode_opening(f"openings[{i}]", opening, limits, compiled) for i, opening in enumerate(step.openings)
    )
    full_bytes += sum(
        _array_bytes(opening.output, 1, limits) for opening in openings if not isinstance(opening, Refusal)
    )
    if full_bytes > limits.max_full_logits_bytes:
        raise oversized(
            f"rows.outputs: {full_bytes} bytes of FULL and HIDDEN output, at most "
            f"{limits.max_full_logits_bytes} (max_full_logits_bytes)"
        )
    return StepPlan(
        session_id=header.session_id,
        step_id=header.step_id,
        epoch=header.epoch,
        digest=digest(step, header) if header.step_id else b"",
        ops=tuple(_op(f"ops[{i}]", op, limits, compiled) for i, op in enumerate(step.ops)),
        rows=rows,
        openings=openings,
    )


def decode_op(
    request: pb.TruncateKvRequest | pb.ReleaseCacheRequest | pb.ForkCacheRequest,
    limits: Limits,
    compiled: CompiledGrammars = NO_GRAMMARS,
) -> StepPlan:
    """The op of a unary RPC, as a step without rows. Raises RequestRefused."""
    header = request.header
    _check_header(header)
    if isinstance(request, pb.ReleaseCacheRequest):
        _check_released(len(request.release.cache_ids), limits)
    op: Op | Refusal
    if isinstance(request, pb.TruncateKvRequest):
        op = Truncate(request.truncate.cache_id, request.truncate.length)
    elif isinstance(request, pb.ReleaseCacheRequest):
        op = Release(tuple(request.release.cache_ids))
    else:
        op = _fork("fork", request.fork, limits, compiled)
    return StepPlan(
        header.session_id,
        header.step_id,
        header.epoch,
        digest(request, header) if header.step_id else b"",
        (op,),
    )


def _check_header(header: pb.StepHeader) -> None:
    size = len(header.traceparent.encode())
    if size > MAX_TRACEPARENT_BYTES:
        raise oversized(f"header.traceparent: {size} bytes, at most {MAX_TRACEPARENT_BYTES}")


def digest(message: Message, header: pb.StepHeader) -> bytes:
    """SHA-256 over type and content of a request, which has this header: a replay has the same.

    The traceparent is no part of it, and is removed from the message.
    """
    header.traceparent = ""
    content = message.SerializeToString(deterministic=True)
    return hashlib.sha256(message.DESCRIPTOR.name.encode() + b"\0" + content).digest()


def _array_bytes(output: OutputMode, positions: int, limits: Limits) -> int:
    """Bytes of the arrays that a row returns for its output positions."""
    if output is OutputMode.FULL:
        return 4 * limits.vocab_size * positions
    return 4 * limits.hidden_size if output is OutputMode.HIDDEN else 0


def _check_ops(ops: Sequence[pb.Op], limits: Limits) -> None:
    if len(ops) > limits.max_ops:
        raise oversized(f"ops: at most {limits.max_ops}, has {len(ops)}")
    _check_released(sum(len(op.release.cache_ids) for op in ops), limits)


def _check_released(count: int, limits: Limits) -> None:
    if count > limits.max_released_ids:
        raise oversized(f"release.cache_ids: at most {limits.max_released_ids} in a step, has {count}")


def _op(field: str, op: pb.Op, limits: Limits, compiled: CompiledGrammars) -> Op | Refusal:
    which = op.WhichOneof("op")
    if which == "release":
        return Release(tuple(op.release.cache_ids))
    if which == "truncate":
        return Truncate(op.truncate.cache_id, op.truncate.length)
    if which == "fork":
        return _fork(f"{field}.fork", op.fork, limits, compiled)
    return invalid(f"{field}: release, truncate or fork")


def _fork(field: str, fork: pb.Fork, limits: Limits, compiled: CompiledGrammars) -> Fork | Refusal:
    if fork.cache_id == 0:
        return invalid(f"{field}.cache_id: must not be 0")
    sampling = decode_sampling(f"{field}.sampling", fork.sampling, limits, compiled)
    if isinstance(sampling, Refusal):
        return sampling
    return Fork(fork.source_id, fork.cache_id, fork.length, sampling)
