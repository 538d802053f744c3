"""The rows of a step: those that continue sequences, and openings; what both may sample."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.limits import Limits
from executor_service.contract.masks import Masks, mask_bytes, read_masks
from executor_service.contract.plan import (
    Opening,
    OutputMode,
    PlannedRows,
    PoolingKind,
    Refusal,
    Row,
    TokenIds,
)
from executor_service.rpc.codec.grammars import NO_GRAMMARS, CompiledGrammars
from executor_service.rpc.codec.refusals import invalid, refused, too_large, unsupported
from executor_service.rpc.codec.sampling import decode_sampling
from executor_service.rpc.codec.tokens import decode_ragged, opening_tokens

T = TypeVar("T", int, bool, bytes)

OUTPUT_MODES: dict[int, OutputMode] = {
    pb.OUTPUT_MODE_UNSPECIFIED: OutputMode.SAMPLE,
    pb.OUTPUT_MODE_SAMPLE: OutputMode.SAMPLE,
    pb.OUTPUT_MODE_TOP_K: OutputMode.TOP_K,
    pb.OUTPUT_MODE_FULL: OutputMode.FULL,
    pb.OUTPUT_MODE_NONE: OutputMode.NONE,
    pb.OUTPUT_MODE_HIDDEN: OutputMode.HIDDEN,
}

_POOLINGS: dict[int, PoolingKind] = {
    pb.POOLING_UNSPECIFIED: PoolingKind.LAST,
    pb.POOLING_LAST: PoolingKind.LAST,
    pb.POOLING_MEAN: PoolingKind.MEAN,
}

_FIELDS_OF_DECODES = 2  # most steps set ids and lengths alone
_UNUSUAL = frozenset(("steps", "outputs", "top_ks"))

FINGERPRINT_BYTES = 32
"""Of an adapter's fingerprint, which is a SHA-256."""


class Takes(enum.Flag):
    """Which rows an RPC takes."""

    OPENINGS = enum.auto()
    DRAFTS = enum.auto()
    STEPS = enum.auto()
    NOTHING = enum.auto()  # a step may have no rows
    ONE = enum.auto()  # exactly one row or opening
    ALL_DRAFTS = enum.auto()  # each row has drafts


PREFILL = Takes.OPENINGS | Takes.ONE
BATCH_PREFILL = Takes.OPENINGS
DECODE = Takes.STEPS | Takes.ONE
BATCH_DECODE = Takes.STEPS
UNIFIED = Takes.OPENINGS | Takes.DRAFTS | Takes.STEPS | Takes.NOTHING
VERIFY = Takes.DRAFTS | Takes.ALL_DRAFTS


def decode_rows(packed: pb.Rows, count: int, limits: Limits, takes: Takes) -> PlannedRows:
    """The rows that continue sequences; `count` is the number of their cache ids. Raises RequestRefused.

    Most rows set few of the fields: what is not set is not checked.
    """
    ids, lengths = list(packed.cache_ids), list(packed.kv_lengths)
    if len(lengths) != count:
        raise refused(f"rows.kv_lengths: {len(lengths)} entries for {count} rows")
    set_fields = packed.ListFields()
    decodes = len(set_fields) == _FIELDS_OF_DECODES and limits.can_sample
    if count and decodes and Takes.ALL_DRAFTS not in takes:
        return PlannedRows(ids, lengths)
    fields = {field.name: values for field, values in set_fields}
    limit = _per_row("limits", fields, count, 0)
    steps = _per_row("steps", fields, count, 1)
    outputs = _per_row("outputs", fields, count, pb.OUTPUT_MODE_SAMPLE)
    top_ks = _per_row("top_ks", fields, count, 0)
    bounds = _per_row("kv_length_bounds", fields, count, default=False)
    tokens, bad_tokens = _ragged("tokens", fields, count, limits)
    drafts, bad_drafts = _ragged("drafts", fields, count, limits)
    masks = _per_row("masks", fields, count, b"")
    if "drafts" in fields and Takes.DRAFTS not in takes:
        raise refused("rows.drafts: this RPC takes rows without drafts")
    if Takes.ALL_DRAFTS in takes and not all(len(row) for row in drafts):
        raise refused("rows.draft_counts: this RPC takes rows with drafts only")
    if Takes.STEPS not in takes and any(number > 1 for number in steps):
        raise refused("rows.steps: this RPC takes no rows with several steps")
    refusals = bad_drafts | bad_tokens
    unusual = not (limits.can_sample and _UNUSUAL.isdisjoint(fields))
    if unusual or max(map(len, drafts), default=0) > limits.max_drafts:
        for i in range(count):
            if bad := _bad_row(i, steps[i], len(drafts[i]), outputs[i], top_ks[i], limits):
                refusals.setdefault(i, bad)
    if "kv_length_bounds" in fields and "tokens" in fields:
        for i in range(count):
            if bounds[i] and len(tokens[i]):
                refusals.setdefault(i, invalid(f"rows.kv_length_bounds[{i}]: not with tokens of its own"))
    modes = [OUTPUT_MODES.get(output, OutputMode.SAMPLE) for output in outputs]
    allowed: list[Masks | None] = [None] * count
    if "masks" in fields:
        for i in range(count):
            field = f"rows.masks[{i}]"
            mask = decode_masks(field, masks[i], 1 + len(drafts[i]), modes[i], limits, steps[i])
            if isinstance(mask, Refusal):
                refusals.setdefault(i, mask)
            else:
                allowed[i] = mask
    taken = [number or 1 for number in steps]
    rows = map(Row, ids, lengths, tokens, drafts, limit, taken, modes, top_ks, bounds, allowed)
    others: dict[int, Row | Refusal] = {i: row for i, row in enumerate(rows) if not row.only_decodes}
    for i, refusal in refusals.items():
        ids[i], lengths[i], others[i] = 0, 0, refusal
    return PlannedRows(ids, lengths, others)


def decode_opening(
    field: str, opening: pb.Opening, limits: Limits, compiled: CompiledGrammars = NO_GRAMMARS
) -> Opening | Refusal:
    """One opening; `field` is its name in error messages."""
    if opening.cache_id == 0:
        return invalid(f"{field}.cache_id: must not be 0")
    tokens = opening_tokens(field, opening, limits)
    if isinstance(tokens, Refusal):
        return tokens
    if opening.prompt_length > len(tokens):
        return invalid(f"{field}.prompt_length: at most {len(tokens)}, is {opening.prompt_length}")
    if opening.output not in OUTPUT_MODES:
        return invalid(f"{field}.output: unknown mode {opening.output}")
    if bad := _bad_top_k(f"{field}.top_k", opening.output, opening.top_k, limits):
        return bad
    if len(opening.salt) > limits.max_salt_bytes:
        return too_large(f"{field}.salt: at most {limits.max_salt_bytes} bytes, has {len(opening.salt)}")
    if opening.adapter:
        if not limits.max_adapters:
            return unsupported(f"{field}.adapter")
        if len(opening.adapter) != FINGERPRINT_BYTES:
            return invalid(f"{field}.adapter: {FINGERPRINT_BYTES} bytes, has {len(opening.adapter)}")
    output = OUTPUT_MODES[opening.output]
    if bad := _bad_prompt_outputs(field, opening, len(tokens), limits):
        return bad
    mask = decode_masks(f"{field}.mask", opening.mask, 1, output, limits)
    if isinstance(mask, Refusal):
        return mask
    sampling = decode_sampling(f"{field}.sampling", opening.sampling, limits, compiled)
    if isinstance(sampling, Refusal):
        return sampling
    return Opening(
        opening.cache_id,
        tokens,
        opening.prompt_length or len(tokens),
        opening.limit,
        sampling,
        output,
        opening.top_k,
        opening.salt,
        mask,
        opening.adapter,
        scored_from=opening.scored_from,
        pooling=_POOLINGS[opening.pooling],
    )


def _bad_prompt_outputs(field: str, opening: pb.Opening, tokens: int, limits: Limits) -> Refusal | None:
    """The refusal of what an opening asks of its prompt: scores, and a vector."""
    if opening.HasField("scored_from"):
        if not limits.can_score:
            return unsupported(f"{field}.scored_from")
        if not 1 <= opening.scored_from < tokens:
            return invalid(
                f"{field}.scored_from: at least 1 and below the number of tokens, {tokens}, "
                f"is {opening.scored_from}"
            )
    if not _is_offered(opening.output, limits):
        return unsupported(f"{field}.output")
    if opening.pooling not in _POOLINGS:
        return invalid(f"{field}.pooling: unknown kind {opening.pooling}")
    if opening.pooling != pb.POOLING_UNSPECIFIED and opening.output != pb.OUTPUT_MODE_HIDDEN:
        return invalid(f"{field}.pooling: only with OUTPUT_MODE_HIDDEN")
    return None


def _is_offered(output: int, limits: Limits) -> bool:
    """Whether rows may have this known OutputMode."""
    match OUTPUT_MODES[output]:
        case OutputMode.HIDDEN:
            return limits.hidden_size > 0
        case OutputMode.NONE:
            return True
    return limits.can_sample


def _bad_row(i: int, steps: int, drafts: int, output: int, top_k: int, limits: Limits) -> Refusal | None:
    if output not in OUTPUT_MODES:
        return invalid(f"rows.outputs[{i}]: unknown mode {output}")
    if not _is_offered(output, limits):
        return unsupported(f"rows.outputs[{i}]")
    if output == pb.OUTPUT_MODE_HIDDEN and drafts:
        return invalid(f"rows.outputs[{i}]: OUTPUT_MODE_HIDDEN is not for rows with drafts")
    if steps > limits.max_steps:
        return too_large(f"rows.steps[{i}]: at most {limits.max_steps} (max_steps), is {steps}")
    if drafts > limits.max_drafts:
        return too_large(f"rows.draft_counts[{i}]: at most {limits.max_drafts} (max_drafts), is {drafts}")
    if steps > 1 and drafts:
        return invalid(f"rows.steps[{i}]: not with drafts")
    if steps > 1 and OUTPUT_MODES[output] is not OutputMode.SAMPLE:
        return invalid(f"rows.steps[{i}]: only with OUTPUT_MODE_SAMPLE")
    return _bad_top_k(f"rows.top_ks[{i}]", output, top_k, limits)


def _bad_top_k(field: str, output: int, top_k: int, limits: Limits) -> Refusal | None:
    if output == pb.OUTPUT_MODE_TOP_K and not 1 <= top_k <= limits.max_logprobs:
        return too_large(f"{field}: 1 to {limits.max_logprobs} (max_logprobs), is {top_k}")
    return None


def _per_row(name: str, fields: Mapping[str, Any], count: int, default: T) -> list[T]:
    """A column of the fields that are set, or the default for all rows."""
    packed: Sequence[T] | None = fields.get(name)
    if packed is None:
        return [default] * count
    if len(packed) != count:
        raise refused(f"rows.{name}: {len(packed)} entries for {count} rows")
    return list(packed)


def _ragged(
    name: str, fields: Mapping[str, Any], count: int, limits: Limits
) -> tuple[list[TokenIds], dict[int, Refusal]]:
    """What `decode_ragged` returns."""
    return decode_ragged(name, fields.get(name, ()), fields.get(f"{name[:-1]}_counts", ()), count, limits)


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
