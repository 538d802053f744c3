"""Plans cross to the executor's messages and back, and an answer that does not fit is noticed."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import pytest
from paceline.executor.v1 import executor_pb2 as pb

from scheduler_service.core.evaluation import HiddenPooling
from scheduler_service.core.request import OutputGrammar, SamplingSettings
from scheduler_service.core.step import (
    CacheFork,
    CacheOpening,
    CacheRow,
    CacheTruncation,
    Code,
    PlannedStep,
    RefusalCause,
    RowMode,
    ScoredTokens,
    TopLogprobs,
)
from scheduler_service.link.codec.foreign import MAX_CHARACTERS
from scheduler_service.link.codec.handshake import decode_facts
from scheduler_service.link.codec.steps import decode_result, encode_step
from scheduler_service.link.facts import Bounds, served_model
from scheduler_service.model import TokenizerSource
from tests.unit.scheduler_shell import fake_executor
from tests.unit.scheduler_shell.models_made_here import LIMITS

HEADER = pb.StepHeader(session_id=3, step_id=9, epoch=77)
OPENING = CacheOpening(
    cache_id=5,
    tokens=(1, 2, 3),
    prompt_length=2,
    limit=2,
    sampling=SamplingSettings(temperature=0.5, top_p=0.9, logit_bias=((4, 1.5),), seed=2**64 - 1, logprobs=2),
    stop_token_ids=(0,),
    min_tokens=4,
    salt=b"s",
    adapter=b"a",
)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (OutputGrammar("json_schema", "{}"), pb.Grammar(json_schema="{}")),
        (OutputGrammar("regex", "a+"), pb.Grammar(regex="a+")),
        (OutputGrammar("regex", "a+", begins_after=0), pb.Grammar(regex="a+", begins_after=0)),
        (
            OutputGrammar("choices", choices=("a", "b")),
            pb.Grammar(choices=pb.GrammarChoices(choices=["a", "b"])),
        ),
        (OutputGrammar("lark", "start: X"), pb.Grammar(lark="start: X")),
        (OutputGrammar("structural_tag", "{}"), pb.Grammar(structural_tag="{}")),
    ],
)
def test_a_grammar_goes_to_executors_that_have_them(grammar: OutputGrammar, message: pb.Grammar) -> None:
    sampling = SamplingSettings(grammar=grammar)
    plan = PlannedStep(
        1, forks=(CacheFork(5, 6, 2, sampling, (), 0),), openings=(replace(OPENING, sampling=sampling),)
    )
    step = encode_step(plan, HEADER)
    assert step.openings[0].sampling.grammar == step.ops[0].fork.sampling.grammar == message
    without = encode_step(plan, HEADER, grammars=False)  # a draft executor guesses as well as it can
    assert not without.openings[0].sampling.HasField("grammar")
    assert not without.ops[0].fork.sampling.HasField("grammar")


VOCABULARY, CONTEXT, PAGES = 100, 64, 20
BOUNDS = Bounds(VOCABULARY, CONTEXT, PAGES)


def test_a_plan_becomes_packed_rows_openings_and_ordered_ops() -> None:
    fork = CacheFork(5, 6, 2, SamplingSettings(seed=1), (0,), 0)
    plan = PlannedStep(
        1,
        releases=(8, 9),
        forks=(fork,),
        rows=(
            CacheRow(10, 7),
            CacheRow(11, 4, limit=2),
            CacheRow(12, 3, tokens=(40, 41)),
            CacheRow(13, 9, drafts=(50,)),
        ),
        openings=(OPENING,),
    )
    step = encode_step(plan, HEADER)
    assert step.header == HEADER
    assert [op.WhichOneof("op") for op in step.ops] == ["release", "fork"]
    assert list(step.ops[0].release.cache_ids) == [8, 9]
    assert (step.ops[1].fork.source_id, step.ops[1].fork.cache_id, step.ops[1].fork.length) == (5, 6, 2)
    assert list(step.ops[1].fork.sampling.stop_token_ids) == [0]  # they end a row with steps
    rows = step.rows
    assert list(rows.cache_ids) == [10, 11, 12, 13]
    assert list(rows.kv_lengths) == [7, 4, 3, 9]
    assert (list(rows.tokens), list(rows.token_counts)) == ([40, 41], [0, 0, 2, 0])
    assert (list(rows.drafts), list(rows.draft_counts)) == ([50], [0, 0, 0, 1])
    assert list(rows.limits) == [0, 2, 0, 0]
    opening = step.openings[0]
    assert not opening.tokens  # its own bytes are cheaper to make
    assert opening.packed_tokens == b"\1\0\0\0\2\0\0\0\3\0\0\0"
    assert (opening.prompt_length, opening.limit) == (2, 2)
    assert opening.sampling.seed == 2**64 - 1
    assert opening.sampling.logprobs == 2
    assert (list(opening.sampling.stop_token_ids), opening.sampling.min_tokens) == ([0], 4)
    assert not opening.sampling.HasField("repetition_penalty")
    assert (opening.salt, opening.adapter) == (b"s", b"a")


def test_a_draft_executors_step_truncates_and_samples_several_tokens_in_a_row() -> None:
    plan = PlannedStep(
        1,
        releases=(8,),
        truncates=(CacheTruncation(10, 5), CacheTruncation(11, 6)),
        forks=(CacheFork(5, 6, 2, SamplingSettings(), (), 0),),
        rows=(CacheRow(10, 5, tokens=(40,), steps=4), CacheRow(11, 6, tokens=(41, 42))),
    )
    step = encode_step(plan, HEADER)
    assert [op.WhichOneof("op") for op in step.ops] == ["release", "truncate", "truncate", "fork"]
    assert [(op.truncate.cache_id, op.truncate.length) for op in step.ops[1:3]] == [(10, 5), (11, 6)]
    assert list(step.rows.steps) == [4, 1]
    message = pb.StepResult(
        rows=pb.RowResults(kv_lengths=[9, 0], token_counts=[4, 0], tokens=[1, 2, 3, 4]),
        ops=[pb.OpResult(released=1), pb.OpResult(kv_length=5), pb.OpResult(), pb.OpResult(kv_length=2)],
        op_errors=[pb.Error(index=2, code=5, message="unknown"), pb.Error(index=3, code=8, message="full")],
    )
    message.rows.errors.add(index=1, code=5, message="unknown")
    result = decode_result(plan, message, BOUNDS)
    assert result.rows[0].tokens == [1, 2, 3, 4]
    assert result.rows[1].code is Code.NOT_FOUND  # how a failed truncation shows
    assert [(fork.kv_length, fork.code) for fork in result.forks] == [(2, Code.RESOURCE_EXHAUSTED)]


def test_what_a_grammar_does_not_allow_is_told_without_the_fields_of_steps() -> None:
    plan = PlannedStep(1, rows=(CacheRow(10, 7), CacheRow(11, 4), CacheRow(12, 4)))
    message = pb.StepResult(step_id=1, rows=pb.RowResults(kv_lengths=[0] * 3, token_counts=[0] * 3))
    grammar = pb.ERROR_REASON_GRAMMAR
    message.rows.errors.add(index=0, code=3, reason=grammar, message="rows.cache_ids[7]: no: token")
    message.rows.errors.add(index=1, code=3, reason=grammar, message="lexer error: too many")
    message.rows.errors.add(index=2, code=3, message="rows.drafts[2]: too many")
    told = [row.message for row in decode_result(plan, message, BOUNDS).rows]
    assert told == ["no: token", "lexer error: too many", "rows.drafts[2]: too many"]


@pytest.mark.parametrize(
    ("reason", "code", "cause"),
    [
        (pb.ERROR_REASON_ADAPTER, Code.NOT_FOUND, RefusalCause.ADAPTER),
        (pb.ERROR_REASON_ADAPTER_SLOTS, Code.RESOURCE_EXHAUSTED, RefusalCause.ADAPTER_SLOTS),
        (pb.ERROR_REASON_PAGES, Code.RESOURCE_EXHAUSTED, RefusalCause.OTHER),
    ],
)
def test_an_opening_refused_for_its_adapter_tells_the_cause(
    reason: pb.ErrorReason.ValueType, code: Code, cause: RefusalCause
) -> None:
    rows = pb.RowResults(kv_lengths=[0], token_counts=[0], cached_lengths=[0])
    rows.errors.add(index=0, code=code, message="no", reason=reason)
    answer = decode_result(PlannedStep(1, openings=(OPENING,)), pb.StepResult(rows=rows), BOUNDS)
    assert (answer.rows[0].code, answer.rows[0].cause) == (code, cause)
    assert answer.lacks_adapter == (cause is RefusalCause.ADAPTER)


def test_plain_decode_rows_carry_ids_and_lengths_alone() -> None:
    step = encode_step(PlannedStep(1, rows=(CacheRow(10, 7), CacheRow(11, 4))), HEADER)
    assert {field.name for field, _ in step.rows.ListFields()} == {"cache_ids", "kv_lengths"}


def test_a_row_behind_unanswered_drafts_carries_a_bound_and_may_become_shorter() -> None:
    plan = PlannedStep(1, rows=(CacheRow(1, 9), CacheRow(2, 9, drafts=(5,), is_bound=True)))
    encoded = encode_step(plan, pb.StepHeader())
    assert encoded.rows == pb.Rows(
        cache_ids=[1, 2], kv_lengths=[9, 9], kv_length_bounds=[False, True], drafts=[5], draft_counts=[0, 1]
    )
    rows = pb.RowResults(kv_lengths=[10, 5], token_counts=[1, 1], tokens=[7, 8])
    answer = decode_result(plan, pb.StepResult(step_id=1, rows=rows), BOUNDS)
    assert [row.kv_length for row in answer.rows] == [10, 5]
    rows.kv_lengths[0] = 5
    with pytest.raises(ValueError, match="KV length 9"):
        decode_result(plan, pb.StepResult(step_id=1, rows=rows), BOUNDS)


def test_an_executor_is_not_asked_for_a_capability_that_it_lacks() -> None:
    info = pb.GetInfoResponse(
        model=pb.ModelInfo(vocab_size=10, context_length=64), limits=fake_executor.LIMITS
    )
    facts = decode_facts(info)
    assert (facts.capacity.max_drafts, facts.capacity.max_steps) == (0, 1)
    assert served_model(facts, TokenizerSource(), LIMITS).max_draft_tokens == 0
    info.capabilities.extend([pb.CAPABILITY_VERIFY, pb.CAPABILITY_MULTI_STEP])
    facts = decode_facts(info)
    assert (facts.capacity.max_drafts, facts.capacity.max_steps) == (8, 6)
    assert served_model(facts, TokenizerSource(), LIMITS).max_draft_tokens == 8


def test_an_answer_becomes_one_result_per_row_then_per_opening() -> None:
    plan = PlannedStep(
        4,
        releases=(1,),
        forks=(CacheFork(5, 6, 2, SamplingSettings(), (), 0),),
        rows=(CacheRow(1, 2), CacheRow(2, 3)),
    )
    plan = PlannedStep(4, plan.releases, plan.forks, plan.rows, (OPENING,))
    message = pb.StepResult(
        rows=pb.RowResults(
            kv_lengths=[3, 0, 2],
            token_counts=[1, 0, 1],
            tokens=[70, 71],
            cached_lengths=[1],
            details=[pb.RowDetail(row=2, logprobs=[-0.5], k=2, top_ids=[9, 71], top_logprobs=[-0.25, -0.5])],
            errors=[pb.Error(index=1, code=8, message="pages")],
        ),
        ops=[pb.OpResult(released=1), pb.OpResult(kv_length=2)],
        op_errors=[pb.Error(index=1, code=99, message="odd")],
        free_pages=5,
        evictable_pages=6,
        compute_us=1500,
    )
    result = decode_result(plan, message, BOUNDS)
    assert (result.number, result.free_pages, result.evictable_pages, result.compute_s) == (4, 5, 6, 0.0015)
    decode, refused, opened = result.rows
    assert (decode.kv_length, decode.tokens, decode.code) == (3, [70], Code.OK)
    assert (refused.code, refused.message, refused.tokens) == (Code.RESOURCE_EXHAUSTED, "pages", [])
    assert (opened.kv_length, opened.tokens, opened.cached_length) == (2, [71], 1)
    assert opened.logprobs == [TopLogprobs(-0.5, (9, 71), (-0.25, -0.5))]
    assert [(fork.kv_length, fork.code) for fork in result.forks] == [(2, Code.INTERNAL)]


def answer(**fields: Any) -> pb.RowResults:
    """A right one to GOING_ON, but for these fields."""
    right: dict[str, Any] = {"kv_lengths": [3], "token_counts": [1], "tokens": [7]}
    return pb.RowResults(**right | fields)


GOING_ON = PlannedStep(1, rows=(CacheRow(1, 2),))
LOGPROBS = pb.RowDetail(logprobs=[-1], k=1, top_ids=[7], top_logprobs=[-1])


def changed(**fields: Any) -> pb.RowDetail:
    detail = pb.RowDetail()
    detail.CopyFrom(LOGPROBS)
    for name, value in fields.items():
        detail.ClearField(name)  # type: ignore[arg-type]
        detail.MergeFrom(pb.RowDetail(**{name: value}))
    return detail


def test_a_wellformed_answer_is_accepted() -> None:
    result = decode_result(GOING_ON, pb.StepResult(rows=answer(details=[LOGPROBS])), BOUNDS)
    assert result.rows[0].logprobs == [TopLogprobs(-1, (7,), (-1,))]


@pytest.mark.parametrize(
    "rows",
    [
        pb.RowResults(),
        answer(token_counts=[2]),
        answer(kv_lengths=[3, 3], token_counts=[1, 0]),
        answer(cached_lengths=[1]),
        answer(errors=[pb.Error(index=1, code=5)]),
        answer(errors=[pb.Error(index=0, code=0)]),
        answer(tokens=[VOCABULARY]),
        answer(tokens=[2**32 - 1]),
        answer(kv_lengths=[2]),  # no token was fed
        answer(kv_lengths=[CONTEXT + 1]),
        answer(kv_lengths=[2**32 - 1]),
        answer(kv_lengths=[4], token_counts=[2], tokens=[7, 7]),  # more than it was asked for
        answer(details=[changed(row=3)]),
        answer(details=[changed(logprobs=[math.nan])]),
        answer(details=[changed(top_logprobs=[math.nan])]),
        answer(details=[changed(logprobs=[])]),
        answer(details=[changed(k=9)]),
        answer(details=[changed(top_ids=[7, 8])]),
    ],
    ids=str,
)
def test_a_malformed_answer_is_refused(rows: pb.RowResults) -> None:
    with pytest.raises((ValueError, IndexError)):
        decode_result(GOING_ON, pb.StepResult(rows=rows), BOUNDS)


@pytest.mark.parametrize("cached", [2, 3, 2**32 - 1])
def test_an_answer_with_a_prefix_hit_beyond_the_computed_tokens_is_refused(cached: int) -> None:
    rows = pb.RowResults(kv_lengths=[2], token_counts=[1], tokens=[7], cached_lengths=[cached])
    with pytest.raises(ValueError, match="KV length"):
        decode_result(PlannedStep(1, openings=(OPENING,)), pb.StepResult(rows=rows), BOUNDS)


def test_an_answer_with_more_pages_than_the_executor_has_is_refused() -> None:
    message = pb.StepResult(rows=answer(), free_pages=PAGES, evictable_pages=1)
    with pytest.raises(ValueError, match="pages"):
        decode_result(GOING_ON, message, BOUNDS)


def test_an_executors_message_about_a_row_is_cut_to_what_a_status_can_carry() -> None:
    error = pb.Error(index=0, code=8, message="x" * 100_000)
    result = decode_result(GOING_ON, pb.StepResult(rows=answer(errors=[error])), BOUNDS)
    assert len(result.rows[0].message) == MAX_CHARACTERS


@pytest.mark.parametrize(
    "field", ["total_pages", "page_size", "max_sequences", "max_rows", "max_step_tokens"]
)
def test_an_executor_with_a_limit_of_0_is_refused(field: str) -> None:
    info = pb.GetInfoResponse(
        model=pb.ModelInfo(vocab_size=10, context_length=64), limits=fake_executor.LIMITS
    )
    decode_facts(info)
    info.limits.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field):
        decode_facts(info)


def test_a_prompts_scores_and_vector_are_asked_for_and_read() -> None:
    plan = PlannedStep(
        1,
        rows=(CacheRow(10, 7, limit=2, mode=RowMode.HIDDEN), CacheRow(11, 7)),
        openings=(
            replace(OPENING, mode=RowMode.NONE, scored_from=1),
            replace(OPENING, mode=RowMode.HIDDEN, pooling=HiddenPooling.MEAN),
        ),
    )
    step = encode_step(plan, HEADER)
    assert list(step.rows.outputs) == [pb.OUTPUT_MODE_HIDDEN, pb.OUTPUT_MODE_UNSPECIFIED]
    scored, pooled = step.openings
    assert (scored.output, scored.scored_from) == (pb.OUTPUT_MODE_NONE, 1)
    assert (pooled.output, pooled.pooling) == (pb.OUTPUT_MODE_HIDDEN, pb.POOLING_MEAN)
    assert not pooled.HasField("scored_from")
    answer = decode_result(plan, _prompt_answer(), replace(BOUNDS, hidden_size=2))
    assert answer.rows[0].hidden == VECTOR
    scores = ScoredTokens(1, array("f", [-1.0]), 2, array("I", [3, 4]), array("f", [-0.5, -1.0]))
    assert answer.rows[2].scores == scores


VECTOR = b"\0\0\x80?\0\0\0@"


def _prompt_answer(scores: pb.Scores | None = None, hidden: pb.Tensor | None = None) -> pb.StepResult:
    rows = pb.RowResults(
        kv_lengths=[9, 8, 2, 2], token_counts=[0, 1, 0, 0], tokens=[1], cached_lengths=[0, 0]
    )
    rows.details.add(row=0, hidden=hidden or pb.Tensor(shape=[2], data=VECTOR))
    given = pb.Scores(first=1, logprobs=[-1], k=2, top_ids=[3, 4], top_logprobs=[-0.5, -1])
    rows.details.add(row=2, scores=scores or given)
    return pb.StepResult(rows=rows)


@pytest.mark.parametrize(
    "message",
    [
        _prompt_answer(pb.Scores(first=1, logprobs=[math.nan])),
        _prompt_answer(pb.Scores(first=1, logprobs=[-math.inf])),
        _prompt_answer(pb.Scores(first=1, logprobs=[-1], k=1)),
        _prompt_answer(pb.Scores(first=1, logprobs=[-1], top_ids=[1], top_logprobs=[-1])),
        _prompt_answer(pb.Scores(first=1, logprobs=[-1], k=1, top_ids=[100], top_logprobs=[-1])),
        _prompt_answer(pb.Scores(first=1, logprobs=[-1], k=1, top_ids=[1], top_logprobs=[math.nan])),
        _prompt_answer(hidden=pb.Tensor(shape=[3], data=VECTOR)),
        _prompt_answer(hidden=pb.Tensor(shape=[2], data=VECTOR[:4])),
        _prompt_answer(hidden=pb.Tensor(shape=[2], data=b"\0\0\xc0\x7f" * 2)),
    ],
)
def test_malformed_scores_and_vectors_are_refused(message: pb.StepResult) -> None:
    plan = PlannedStep(
        1, rows=(CacheRow(10, 7, limit=2, mode=RowMode.HIDDEN), CacheRow(11, 7)), openings=(OPENING, OPENING)
    )
    with pytest.raises(ValueError, match=r"score|vector|token id"):
        decode_result(plan, message, replace(BOUNDS, hidden_size=2))


def test_forced_tokens_come_with_logprobs_or_without() -> None:
    plan = PlannedStep(1, rows=(CacheRow(5, 3), CacheRow(6, 3)))
    message = pb.StepResult(
        free_pages=1, rows=pb.RowResults(kv_lengths=[4, 4], token_counts=[1, 1], tokens=[7, 8])
    )
    message.rows.details.add(row=0, forced_tokens=[9, 10])
    message.rows.details.add(row=1, forced_tokens=[9], logprobs=[-0.5])
    first, second = decode_result(plan, message, BOUNDS).rows
    assert (first.forced, first.logprobs) == ((9, 10), ())
    assert (second.forced, [one.logprob for one in second.logprobs]) == ((9,), [-0.5])
    message.rows.details[0].forced_tokens.append(VOCABULARY)
    with pytest.raises(ValueError, match="forced token"):
        decode_result(plan, message, BOUNDS)
