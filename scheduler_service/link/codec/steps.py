"""`PlannedStep` to paceline.executor.v1.Step and back to `StepAnswer`.

On the hot path: 256 decode rows cost a few comprehensions, as rows are parallel packed arrays and
an array that holds nothing but defaults is left out.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence

import numpy as np
from paceline.executor.v1 import executor_pb2 as pb

from scheduler_service.core.evaluation import HiddenPooling, packed_ids
from scheduler_service.core.request import OutputGrammar, SamplingSettings
from scheduler_service.core.step import (
    CacheOpening,
    CacheRow,
    Code,
    PlannedStep,
    RefusalCause,
    RowAnswer,
    RowMode,
    ScoredTokens,
    StepAnswer,
    TopLogprobs,
)
from scheduler_service.link.codec.foreign import brief
from scheduler_service.link.facts import Bounds

_DEFAULT = SamplingSettings()
_MODES = {
    RowMode.SAMPLE: pb.OUTPUT_MODE_UNSPECIFIED,
    RowMode.NONE: pb.OUTPUT_MODE_NONE,
    RowMode.HIDDEN: pb.OUTPUT_MODE_HIDDEN,
}
_POOLINGS = {
    None: pb.POOLING_UNSPECIFIED,
    HiddenPooling.LAST: pb.POOLING_LAST,
    HiddenPooling.MEAN: pb.POOLING_MEAN,
}


def encode_step(plan: PlannedStep, header: pb.StepHeader, *, grammars: bool = True) -> pb.Step:
    """The step that this plan asks for. `grammars`: whether the executor takes them; drafters may not."""
    ops = [pb.Op(release=pb.Release(cache_ids=plan.releases))] if plan.releases else []
    ops += [pb.Op(truncate=pb.Truncate(cache_id=cut.cache_id, length=cut.length)) for cut in plan.truncates]
    for fork in plan.forks:
        sampling = _sampling(fork.sampling, fork.stop_token_ids, fork.min_tokens, grammars=grammars)
        ops.append(
            pb.Op(
                fork=pb.Fork(
                    source_id=fork.source_id, cache_id=fork.cache_id, length=fork.length, sampling=sampling
                )
            )
        )
    return pb.Step(
        header=header,
        ops=ops,
        rows=_rows(plan.rows) if plan.rows else None,
        openings=[
            pb.Opening(
                cache_id=opening.cache_id,
                packed_tokens=packed_ids(opening.tokens),
                prompt_length=opening.prompt_length,
                limit=opening.limit,
                sampling=_sampling(
                    opening.sampling, opening.stop_token_ids, opening.min_tokens, grammars=grammars
                ),
                salt=opening.salt,
                adapter=opening.adapter,
                output=_MODES[opening.mode],
                scored_from=opening.scored_from or None,
                pooling=_POOLINGS[opening.pooling],
            )
            for opening in plan.openings
        ],
    )


def _rows(rows: tuple[CacheRow, ...]) -> pb.Rows:
    message = pb.Rows(cache_ids=[row.cache_id for row in rows], kv_lengths=[row.kv_length for row in rows])
    token_counts = [len(row.tokens) for row in rows]
    if any(token_counts):
        message.tokens.extend([token for row in rows for token in row.tokens])
        message.token_counts.extend(token_counts)
    draft_counts = [len(row.drafts) for row in rows]
    if any(draft_counts):
        message.drafts.extend([token for row in rows for token in row.drafts])
        message.draft_counts.extend(draft_counts)
    limits = [row.limit for row in rows]
    if any(limits):
        message.limits.extend(limits)
    steps = [row.steps for row in rows]
    if any(number > 1 for number in steps):
        message.steps.extend(steps)
    bounds = [row.is_bound for row in rows]
    if any(bounds):
        message.kv_length_bounds.extend(bounds)
    modes = [row.mode for row in rows]
    if modes.count(RowMode.SAMPLE) < len(modes):
        message.outputs.extend([_MODES[mode] for mode in modes])
    return message


def _sampling(
    sampling: SamplingSettings, stop_token_ids: tuple[int, ...], min_tokens: int, *, grammars: bool
) -> pb.Sampling:
    message = pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
    )
    if sampling.top_p != _DEFAULT.top_p:
        message.top_p = sampling.top_p
    if sampling.repetition_penalty != _DEFAULT.repetition_penalty:
        message.repetition_penalty = sampling.repetition_penalty
    if sampling.grammar is not None and grammars:
        message.grammar.CopyFrom(encode_grammar(sampling.grammar))
    return message


def decode_result(plan: PlannedStep, message: pb.StepResult, bounds: Bounds) -> StepAnswer:
    """The answer to this plan. Raises ValueError or IndexError if it can't be an answer to it."""
    rows = message.rows
    expected = len(plan.rows) + len(plan.openings)
    counts, lengths, tokens = list(rows.token_counts), list(rows.kv_lengths), list(rows.tokens)
    if len(counts) != expected or len(lengths) != expected or sum(counts) != len(tokens):
        raise ValueError(f"a step of {expected} rows was answered with {len(counts)}")
    if tokens and max(tokens) >= bounds.vocab_size:
        raise ValueError(f"token id {max(tokens)} of a vocabulary of {bounds.vocab_size}")
    if message.free_pages + message.evictable_pages > bounds.total_pages:
        raise ValueError(f"{message.free_pages} + {message.evictable_pages} of {bounds.total_pages} pages")
    results = []
    start = 0
    for length, count in zip(lengths, counts, strict=True):
        end = start + count
        results.append(RowAnswer(length, tokens[start:end]))
        start = end
    for error in rows.errors:
        _refuse(results[error.index], error)
    for row, answer in zip(plan.rows, results):  # noqa: B905  # the openings' answers come after these
        if answer.code:
            continue
        before = 0 if row.is_bound else row.kv_length
        if not before < answer.kv_length <= bounds.context_length:
            raise _wrong_length(before, bounds.context_length, answer.kv_length)
        if len(answer.tokens) > 1:  # any row may sample one
            _check_count(len(answer.tokens), len(row.drafts) + 1 if row.drafts else row.steps)
    _check_openings(plan.openings, results[len(plan.rows) :], rows.cached_lengths)
    for detail in rows.details:
        answer = results[detail.row]
        if detail.forced_tokens:
            if max(detail.forced_tokens) >= bounds.vocab_size:
                raise ValueError(f"a forced token {max(detail.forced_tokens)} is outside of the vocabulary")
            answer.forced = tuple(detail.forced_tokens)
        if detail.HasField("scores"):
            answer.scores = _scores(detail.scores, bounds)
        if detail.HasField("hidden"):
            answer.hidden = _vector(detail.hidden, bounds)
        if detail.logprobs or not (detail.forced_tokens or answer.scores or answer.hidden):
            answer.logprobs = _logprobs(detail, len(answer.tokens))
    return StepAnswer(
        number=plan.number,
        rows=results,
        forks=_forks(plan, message),
        free_pages=message.free_pages,
        evictable_pages=message.evictable_pages,
        compute_s=message.compute_us / 1e6,
        lacks_adapter=any(error.reason == pb.ERROR_REASON_ADAPTER for error in rows.errors),
    )


def _forks(plan: PlannedStep, message: pb.StepResult) -> list[RowAnswer]:
    # A truncation that failed shows as its row's own error: the KV length is another.
    first = (1 if plan.releases else 0) + len(plan.truncates)
    if len(message.ops) != first + len(plan.forks):
        raise ValueError(f"a step of {first + len(plan.forks)} ops was answered with {len(message.ops)}")
    forks = [RowAnswer(kv_length=op.kv_length) for op in message.ops[first:]]
    for error in message.op_errors:
        if error.index >= first:
            _refuse(forks[error.index - first], error)
    return forks


_STEP_FIELD = re.compile(r"[a-z_.\d[\]]+: ")
"""How refusals begin: with the field of the step, of which a client of the scheduler knows nothing."""
_CAUSES = {
    pb.ERROR_REASON_GRAMMAR: RefusalCause.GRAMMAR,
    pb.ERROR_REASON_GRAMMAR_BEHIND: RefusalCause.GRAMMAR_BEHIND,
    pb.ERROR_REASON_ADAPTER: RefusalCause.ADAPTER,
    pb.ERROR_REASON_ADAPTER_SLOTS: RefusalCause.ADAPTER_SLOTS,
}


def _refuse(refused: RowAnswer, error: pb.Error) -> None:
    if not error.code:
        raise ValueError(f"row or op {error.index} has the error OK")
    refused.code, refused.message = _code(error.code), brief(error.message)
    refused.cause = _CAUSES.get(error.reason, RefusalCause.OTHER)
    if refused.cause is RefusalCause.GRAMMAR:
        field = _STEP_FIELD.match(refused.message)
        refused.message = refused.message[field.end() if field else 0 :]


def _check_openings(
    openings: Sequence[CacheOpening], answers: Sequence[RowAnswer], cached_lengths: Sequence[int]
) -> None:
    for opening, answer, cached in zip(openings, answers, cached_lengths, strict=True):
        answer.cached_length = cached
        if answer.code:
            continue
        if not cached < answer.kv_length <= len(opening.tokens):
            raise _wrong_length(cached, len(opening.tokens), answer.kv_length)
        _check_count(len(answer.tokens), 1)


def _wrong_length(before: int, end: int, length: int) -> ValueError:
    return ValueError(f"a row of KV length {before}, and {end} at most, became {length}")


def _check_count(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise ValueError(f"a row that samples {limit} tokens at most sampled {tokens}")


def _logprobs(detail: pb.RowDetail, count: int) -> list[TopLogprobs]:
    k, ids, values = detail.k, tuple(detail.top_ids), tuple(detail.top_logprobs)
    if len(detail.logprobs) != count or len(ids) != k * count or len(values) != k * count:
        raise ValueError(f"{count} tokens have {len(detail.logprobs)} logprobs, and {len(values)} of others")
    if any(map(math.isnan, detail.logprobs)) or any(map(math.isnan, values)):
        raise ValueError("a logprob is NaN")
    return [
        TopLogprobs(logprob, ids[i * k : i * k + k], values[i * k : i * k + k])
        for i, logprob in enumerate(detail.logprobs)
    ]


def _scores(scores: pb.Scores, bounds: Bounds) -> ScoredTokens:
    logprobs, values = np.array(scores.logprobs, np.float32), np.array(scores.top_logprobs, np.float32)
    ids = np.array(scores.top_ids, np.uint32)
    if len(ids) != scores.k * len(logprobs) or len(values) != len(ids):
        raise ValueError(f"{len(logprobs)} scores with {len(ids)} alternatives, {scores.k} each")
    if not (np.isfinite(logprobs).all() and np.isfinite(values).all()):
        raise ValueError("a score is not finite")
    if len(ids) and ids.max() >= bounds.vocab_size:
        raise ValueError(f"token id {ids.max()} of a vocabulary of {bounds.vocab_size}")
    return ScoredTokens(
        scores.first,
        array("f", logprobs.tobytes()),
        scores.k,
        array("I", ids.tobytes()),
        array("f", values.tobytes()),
    )


def _vector(tensor: pb.Tensor, bounds: Bounds) -> bytes:
    if list(tensor.shape) != [bounds.hidden_size] or len(tensor.data) != 4 * bounds.hidden_size:
        raise ValueError(f"a vector of {list(tensor.shape)} values, not {bounds.hidden_size}")
    if not np.isfinite(np.frombuffer(tensor.data, "<f4")).all():
        raise ValueError("a vector is not finite")
    return tensor.data


def _code(number: int) -> Code:
    try:
        return Code(number)
    except ValueError:  # not one of the contract's: nothing we know a cure for
        return Code.INTERNAL


def encode_grammar(grammar: OutputGrammar) -> pb.Grammar:
    """The message of a grammar."""
    message = pb.Grammar(begins_after=grammar.begins_after)
    if grammar.kind == "choices":
        message.choices.choices.extend(grammar.choices)
        return message
    setattr(message, grammar.kind, grammar.text)
    return message
