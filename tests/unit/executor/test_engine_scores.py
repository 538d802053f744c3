"""Scores and vectors of prompts: the same however a prompt is cut, cached, undone or put beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow
from executor_service.backends.numpy_sampler import log_softmax
from executor_service.backends.oracle_backend.clocked_oracle import oracle_of
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.backends.reference.paged_attention import PagedAttentionBackend, PagedAttentionConfig
from executor_service.contract.plan import (
    Abandoned,
    Opening,
    OutputMode,
    PoolingKind,
    Reason,
    RowResult,
    Sampling,
    TokenIds,
)
from tests.support.engine_steps import begin
from tests.unit.executor.fakes import limits
from tests.unit.executor.harness import Harness, Release, Truncate, opening, plan, row

VOCAB, PAGE, POISON = 64, 4, 63
HIDDEN, NONE = OutputMode.HIDDEN, OutputMode.NONE
PROMPT = np.random.default_rng(1).integers(0, POISON, 19).tolist()
BACKENDS = ["oracle", "clocked", "paged-attention"]


def backend_of(name: str) -> Any:
    if name == "paged-attention":
        return PagedAttentionBackend(PagedAttentionConfig(VOCAB, 256, heads=2, kv_heads=1, head_dim=8))
    step_ms = 0.01 if name == "clocked" else 0.0
    return oracle_of(
        OracleSettings(vocab_size=VOCAB, context_length=256, step_ms=step_ms, nan_on_token=POISON)
    )


def harness(name: str = "oracle", **bounds: Any) -> Harness:
    backend = backend_of(name)
    values = {"vocab_size": VOCAB, "page_size": PAGE, "can_score": True, **bounds}
    return Harness(limits(hidden_size=backend.info.hidden_size, **values), backend)


def scored(cache_id: int, p: int, tokens: Sequence[int] = PROMPT, k: int = 0, **fields: Any) -> Opening:
    base = opening(cache_id, list(tokens), output=fields.pop("output", NONE), logprobs=k)
    return replace(base, scored_from=p, **fields)


def pooled(cache_id: int, pooling: PoolingKind = PoolingKind.MEAN, **fields: Any) -> Opening:
    return replace(opening(cache_id, PROMPT, output=HIDDEN), pooling=pooling, **fields)


def expected(backend: Any, tokens: Sequence[int], p: int) -> NDArray[np.float32]:
    """Logprobs of tokens[p:], by the Forward RPC's way."""
    (once,) = backend.forward_once([np.array(tokens, np.int32)], frozenset({"logits"}))
    return log_softmax(once.logits)[np.arange(p - 1, len(tokens) - 1), tokens[p:]]


def states(backend: Any, tokens: TokenIds | Sequence[int]) -> NDArray[np.float32]:
    (once,) = backend.forward_once([np.array(tokens, np.int32)], frozenset({"hidden"}))
    hidden: NDArray[np.float32] = once.hidden
    return hidden


def run_out(engine: Harness, first: Opening, *limits: int, output: OutputMode = NONE) -> list[RowResult]:
    """The answers to an opening and to the chunks that follow it, the last of which takes what is left."""
    results = [engine.row(first)]
    for limit in (*limits, 0):
        if results[-1].kv_length < len(first.tokens):
            results.append(engine.row(row(first.cache_id, results[-1].kv_length, limit=limit, output=output)))
    return results


def scores_of(results: Sequence[RowResult]) -> tuple[int, list[float]]:
    """The position of the first score, and all of them; those of two answers must meet."""
    parts = [result.scores for result in results if result.scores is not None]
    for one, other in pairwise(parts):
        assert other.first == one.first + len(one.logprobs)
    return parts[0].first, np.concatenate([part.logprobs for part in parts]).tolist()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("p", [1, 2, 5, 18])
def test_scores_are_the_logprobs_of_the_prompts_own_tokens(name: str, p: int) -> None:
    engine = harness(name)
    assert scores_of([engine.row(scored(1, p))]) == (p, expected(engine.backend, PROMPT, p).tolist())


@pytest.mark.parametrize("name", BACKENDS)
def test_scores_do_not_depend_on_chunks_batches_pieces_or_prefix_hits(name: str) -> None:
    engine = harness(name)
    want = 3, expected(engine.backend, PROMPT, 3).tolist()
    assert scores_of(run_out(engine, scored(1, 3, limit=1), 1, 4, 2)) == want
    assert scores_of(run_out(engine, scored(2, 3, limit=7), 3)) == want
    beside = engine.step(scored(3, 3), opening(4, PROMPT[:5]), scored(5, 9, PROMPT[::-1])).rows
    assert scores_of(beside[:1]) == want
    assert scores_of(beside[2:]) == (9, expected(engine.backend, PROMPT[::-1], 9).tolist())
    hit = engine.row(scored(6, 14))
    assert hit.cached_length == 12
    assert scores_of([hit]) == (14, want[1][11:])
    assert scores_of([harness(name, max_piece_tokens=4).row(scored(1, 3))]) == want


@pytest.mark.parametrize("p", [1, 4, 5, 8, 9, 16, 17, 18])
def test_the_prefix_hit_ends_before_the_token_whose_logits_give_the_first_score(p: int) -> None:
    engine = harness()
    engine.row(opening(1, PROMPT))
    found = engine.row(scored(2, p))
    assert found.cached_length == (p - 1) // PAGE * PAGE
    assert scores_of([found])[0] == p


def test_alternatives_are_the_most_likely_tokens() -> None:
    engine = harness(max_piece_tokens=4)
    found = engine.row(scored(1, 6, k=3)).scores
    assert found is not None
    (once,) = engine.backend.forward_once([np.array(PROMPT, np.int32)], frozenset({"logits"}))
    logprobs = log_softmax(once.logits)[5:-1]
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :3]
    assert found.top_ids.tolist() == order.tolist()
    assert found.top_logprobs.tolist() == np.take_along_axis(logprobs, order, 1).tolist()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_score_is_the_logprob_that_sampling_the_token_gives(name: str) -> None:
    """Whatever the penalties, the bias and the masks: logprobs are of the raw logits."""
    engine = harness(name)
    rules = Sampling(repetition_penalty=1.7, presence_penalty=2.0, logit_bias=((5, 3.0),), logprobs=2)
    first = engine.row(replace(opening(1, PROMPT), sampling=rules))
    known, logprobs = [*PROMPT, *first.tokens], [first.logprobs]
    for _ in range(4):
        one = engine.row(row(1, len(known) - 1))
        known += one.tokens
        logprobs.append(one.logprobs)
    again = engine.row(replace(scored(2, len(PROMPT), known), sampling=rules))
    assert scores_of([again])[1] == np.concatenate(logprobs).tolist()  # type: ignore[arg-type]


def test_an_opening_with_scores_samples_as_without() -> None:
    one, other = harness().row(opening(1, PROMPT)), harness().row(scored(1, 2, output=OutputMode.SAMPLE))
    assert one.tokens == other.tokens
    assert one.scores is None


def test_only_the_openings_own_tokens_are_scored() -> None:
    engine = harness()
    engine.row(scored(1, 2, output=OutputMode.SAMPLE))
    assert engine.row(row(1, len(PROMPT))).scores is None
    engine.row(scored(2, 2, limit=6))
    engine.op(Truncate(2, 4))
    assert engine.row(row(2, 4, tokens=[1, 2, 3])).scores is None


def test_scored_pages_are_shared_without_an_output() -> None:
    """Of a prompt that is scored and nothing else: finite logits prove finite keys and values."""
    engine = harness()
    engine.row(scored(1, 10))
    assert engine.row(opening(2, PROMPT)).cached_length == 16
    engine = harness()
    engine.row(scored(1, 15, PROMPT[:16]))
    assert engine.row(opening(2, PROMPT)).cached_length == 12, "nothing proves the last token's values"
    engine = harness()
    engine.row(scored(1, 18, limit=9))
    assert engine.row(opening(2, PROMPT)).cached_length == 0, "nothing has been scored yet"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("chunks", [(), (1, 1), (7, 3), (18,)])
def test_a_vector_is_the_last_state_or_the_mean_of_all(name: str, chunks: tuple[int, ...]) -> None:
    for pieces in (2048, 4):
        engine = harness(name, max_piece_tokens=pieces)
        all_states = states(engine.backend, PROMPT)
        engine.row(opening(9, PROMPT))
        limit = chunks[0] if chunks else 0
        last = run_out(engine, pooled(1, PoolingKind.LAST, limit=limit), *chunks[1:], output=HIDDEN)
        mean = run_out(engine, pooled(2, limit=limit), *chunks[1:], output=HIDDEN)
        assert all(result.hidden is None for result in [*last, *mean] if result.kv_length < len(PROMPT))
        np.testing.assert_allclose(last[-1].hidden, all_states[-1], atol=1e-6)  # type: ignore[arg-type]
        np.testing.assert_allclose(mean[-1].hidden, all_states.mean(0), atol=1e-6)  # type: ignore[arg-type]
        assert last[0].cached_length == 16
        assert mean[0].cached_length == 0


def test_a_mean_has_the_same_bits_however_the_prompt_is_cut() -> None:
    engine = harness("paged-attention")
    want = engine.row(pooled(1)).hidden
    assert want is not None
    for cache_id, limit in enumerate((1, 3, 8), 2):
        cut = run_out(engine, pooled(cache_id, limit=limit), limit, limit, output=HIDDEN)
        assert cut[-1].hidden is not None
        assert cut[-1].hidden.tobytes() == want.tobytes()


def test_a_vector_of_what_was_fed_last() -> None:
    """After the prompt, a row with OUTPUT_MODE_HIDDEN returns the state of the last token that it feeds."""
    engine = harness()
    token = engine.row(opening(1, PROMPT)).tokens
    found = engine.row(row(1, len(PROMPT), output=HIDDEN))
    assert (found.tokens, found.kv_length) == ([], len(PROMPT) + 1)
    assert found.hidden is not None
    assert found.hidden.tolist() == states(engine.backend, [*PROMPT, *token])[-1].tolist()


def test_a_mean_that_is_not_known_is_refused() -> None:
    engine = harness()
    engine.row(pooled(1))
    cut = engine.row(pooled(2, limit=8))
    engine.op(Truncate(2, cut.kv_length - 1))
    for item in (row(1, len(PROMPT), [5], output=HIDDEN), row(2, 7, PROMPT[7:], output=HIDDEN)):
        before = engine.snapshot()
        refusal = engine.row(item).refusal
        assert refusal is not None
        assert refusal.reason is Reason.INVALID
        assert refusal.message.startswith("rows.outputs[0]: POOLING_MEAN")
        assert engine.snapshot() == before
    assert engine.row(row(2, 7, PROMPT[7:])).refusal is None


@pytest.mark.parametrize("item", [scored(1, 2), pooled(1), pooled(1, PoolingKind.LAST)])
def test_a_prompt_that_is_not_finite_is_refused_and_nothing_of_it_stays(item: Opening) -> None:
    engine = harness()
    before = engine.snapshot()
    tokens = np.array([*PROMPT[:10], POISON, *PROMPT[10:]], np.int32)
    found = engine.row(replace(item, tokens=tokens, prompt_length=len(tokens)))
    assert found.refusal is not None
    assert found.refusal.reason is Reason.NOT_FINITE
    assert (found.scores, found.hidden) == (None, None)
    assert engine.snapshot() == before


def test_scores_before_a_token_that_is_not_finite_are_good() -> None:
    engine = harness()
    found = engine.row(scored(1, 2, [*PROMPT, POISON]))
    assert scores_of([found]) == (2, expected(engine.backend, [*PROMPT, POISON], 2).tolist())


@pytest.mark.parametrize("item", [scored(2, 2, limit=3), pooled(2, limit=3)])
def test_two_steps_in_flight_give_what_one_after_another_gives(item: Opening) -> None:
    """Chunks of a prompt, each begun before the one ahead of it is answered."""
    engine = harness("clocked")
    session = engine.engine.open_session(0, 0, "").id
    alone = run_out(harness(), item, 3, 3, output=item.output)
    begun = [engine.begin(item, session=session, step_id=1)]
    for number, at in enumerate((3, 6), 2):
        chunk = row(2, at, limit=3, output=item.output)
        begun.append(engine.begin(chunk, session=session, step_id=number))
        assert begun[-1].result is None
    begun.append(engine.begin(row(2, 9, output=item.output), session=session, step_id=4))
    together = [step.finish().rows[0] for step in begun]
    assert len(alone) == len(together)
    for one, other in zip(alone, together, strict=True):
        assert repr(one) == repr(other)


def test_a_mean_behind_a_row_that_samples_is_refused_before_that_row_is_answered() -> None:
    """As it is afterwards: the row in flight ends the prompt, and with it the sum."""
    engine = harness("clocked")
    engine.row(pooled(1, limit=3))
    sampling = engine.begin(row(1, 3))
    behind = engine.begin(row(1, len(PROMPT), output=HIDDEN)).finish().rows[0]
    assert sampling.finish().rows[0].refusal is None
    assert behind.refusal is not None
    assert behind.refusal.reason is Reason.INVALID


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("item", [scored(1, 2, limit=3), pooled(1, limit=3)])
def test_an_abandoned_step_leaves_scores_and_means_as_they_were(item: Opening, wanted: int) -> None:
    """Undone after any of its forwards, and done again."""
    alone = run_out(harness(), item, output=item.output)[-1]
    engine = harness(max_piece_tokens=4)
    engine.row(item)
    rest = plan(row(1, 3, output=item.output))
    answers = iter([True] * wanted)
    if wanted < 4:
        with pytest.raises(Abandoned):
            begin(engine.engine, rest, lambda: next(answers, False), abandonable=True)
    again = begin(engine.engine, rest, abandonable=True).finish().rows[0]
    assert repr(again) == repr(alone)


def test_a_truncation_that_is_undone_brings_scores_and_means_back() -> None:
    for item in (scored(1, 2, limit=3), pooled(1, limit=3)):
        alone = run_out(harness(), item, output=item.output)[-1]
        engine = harness(max_piece_tokens=4)
        engine.row(item)
        cut = plan(row(1, 2, PROMPT, output=NONE), ops=(Truncate(1, 2),))
        with pytest.raises(Abandoned):
            begin(engine.engine, cut, lambda: False, abandonable=True)
        assert repr(engine.row(row(1, 3, output=item.output))) == repr(alone)


def test_a_replayed_step_brings_the_same_scores() -> None:
    engine = harness()
    session = engine.engine.open_session(0, 0, "").id
    one, two = (engine.step(scored(1, 2, k=2), session=session, step_id=1) for _ in range(2))
    assert one is two


def test_scores_that_make_a_reply_too_large_refuse_their_row_alone() -> None:
    room = 12 * (4 + 2 * 9)
    engine = harness(max_full_logits_bytes=room)
    rows = engine.step(scored(1, 12, k=2), scored(2, 14, k=2), scored(3, 18, k=2)).rows
    assert [r.refusal is None for r in rows] == [True, True, False]
    assert rows[2].refusal is not None
    assert rows[2].refusal.reason is Reason.TOO_LARGE
    assert rows[2].refusal.message == (
        "openings[2].scored_from: 22 bytes of scores, but only 0 of the step's 264 (max_full_logits_bytes) "
        "are left"
    )
    first = engine.row(scored(4, 2, k=2, limit=2))
    assert scores_of([first])[0] == 2
    over = engine.row(row(4, 2, output=NONE)).refusal
    assert over is not None
    assert over.message.startswith("rows.limits[0]: 352 bytes of scores")
    assert engine.row(row(4, 2, limit=12, output=NONE)).refusal is None
    engine.step(ops=(Release((1, 2, 4)),))


def test_what_is_no_prompt_costs_nothing() -> None:
    """A row of a sequence without scores or vectors asks a backend for neither."""
    engine = harness()
    seen: list[Any] = []
    forward = engine.backend.forward

    def watched(rows: Sequence[ForwardRow]) -> Any:
        seen.extend(row.prompt for row in rows)
        return forward(rows)

    engine.backend.forward = watched
    engine.row(opening(1, PROMPT))
    engine.row(row(1, len(PROMPT)))
    engine.row(row(1, len(PROMPT) + 1, output=OutputMode.FULL))
    assert seen == [None] * 3
