"""What rows do to the KV length, what they answer, and what a refused one leaves alone."""

from __future__ import annotations

import numpy as np
import pytest

from executor_service.contract.plan import Opening, OutputMode, Reason, Refusal, Row, StepPlan
from tests.support.engine_steps import execute, planned
from tests.unit.executor.fakes import continuation, limits, next_token
from tests.unit.executor.harness import Harness, Release, Truncate, fork, opening, row

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def h() -> Harness:
    return Harness()


def test_an_opening_computes_the_prompt_and_samples(h: Harness) -> None:
    result = h.row(opening(1, PROMPT))
    assert (result.kv_length, result.cached_length, result.tokens) == (6, 0, continuation(PROMPT, 1))


def test_an_opening_starts_behind_its_prefix_hit(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    result = h.row(opening(2, PROMPT))
    assert (result.kv_length, result.cached_length, result.tokens) == (6, 4, continuation(PROMPT, 1))
    assert h.backend.forwards[-1] == [2]


def test_chunks_sample_only_at_the_prompts_end(h: Harness) -> None:
    first = h.row(opening(1, PROMPT, limit=4))
    assert (first.kv_length, first.tokens) == (4, [])
    second = h.row(row(1, 4, limit=1))
    assert (second.kv_length, second.tokens) == (5, [])
    third = h.row(row(1, 5, limit=9))
    assert (third.kv_length, third.tokens) == (6, continuation(PROMPT, 1))


def test_a_decode_feeds_the_token_sampled_last(h: Harness) -> None:
    expected = continuation(PROMPT, 8)
    tokens = h.row(opening(1, PROMPT)).tokens
    for n in range(6, 13):
        result = h.row(row(1, n))
        assert result.kv_length == n + 1
        tokens += result.tokens
    assert tokens == expected


def test_given_tokens_take_the_place_of_the_sampled_one(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    result = h.row(row(1, 6, tokens=[1, 2]))
    assert (result.kv_length, result.tokens) == (8, continuation([*PROMPT, 1, 2], 1))


def test_given_tokens_may_be_fed_in_chunks(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    assert h.row(row(1, 6, tokens=[1, 2, 3], limit=1)).tokens == []
    result = h.row(row(1, 7))
    assert (result.kv_length, result.tokens) == (9, continuation([*PROMPT, 1, 2, 3], 1))


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_verify_row_emits_the_accepted_drafts_and_one_more(h: Harness, right: int) -> None:
    truth = continuation(PROMPT, 5)
    h.row(opening(1, PROMPT))
    drafts = [t if i < right else (t + 1) % 97 for i, t in enumerate(truth[1:4])]
    result = h.row(row(1, 6, drafts=drafts))
    assert result.tokens == truth[1 : right + 2]
    assert result.kv_length == 7 + right
    assert h.row(row(1, 7 + right)).tokens == [next_token([*PROMPT, *truth[: right + 2]])]
    assert h.engine.counters.drafts_accepted == right


def test_rejected_drafts_keep_no_pages(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    before = h.engine.store.pages.free
    h.row(row(1, 6, drafts=[(continuation(PROMPT, 2)[1] + 1) % 97] * 12))
    assert h.engine.store.pages.free == before


def test_drafts_behind_given_tokens_are_verified_too(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    truth = continuation([*PROMPT, 1, 2, 3], 3)
    result = h.row(row(1, 6, tokens=[1, 2, 3], drafts=[truth[0], 96]))
    assert (result.kv_length, result.tokens) == (10, truth[:2])


def test_a_verify_row_without_sampling_accepts_nothing_and_keeps_everything(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    result = h.row(row(1, 6, drafts=[1, 2], output=OutputMode.FULL))
    assert (result.kv_length, result.tokens) == (9, [])
    assert result.logits is not None
    assert result.logits.shape == (3, 97)
    assert h.row(row(1, 9)).refusal == Refusal(Reason.INVALID, "rows.tokens[0]: required, nothing is pending")


def test_full_output_behind_several_given_tokens_has_one_row_per_draft_and_one_more(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    result = h.row(row(1, 6, tokens=[1, 2, 3], drafts=[4, 5], output=OutputMode.FULL))
    assert result.logits is not None
    chosen = np.argmax(result.logits, axis=1).tolist()
    fed = [*PROMPT, 1, 2, 3, 4, 5]
    assert chosen == [next_token(fed[:n]) for n in (9, 10, 11)]


def test_several_steps_are_several_decodes(h: Harness) -> None:
    expected = continuation(PROMPT, 7)
    h.row(opening(1, PROMPT))
    result = h.row(row(1, 6, steps=5))
    assert (result.kv_length, result.tokens) == (11, expected[1:6])
    assert h.row(row(1, 11)).tokens == expected[6:]


def test_several_steps_end_early_at_a_stop_token_and_keep_no_pages(h: Harness) -> None:
    expected = continuation(PROMPT, 20)
    stop = expected[2]
    h.row(opening(1, PROMPT, stops=(stop,)))
    result = h.row(row(1, 6, steps=19))
    assert result.tokens == expected[1 : expected.index(stop, 1) + 1]
    assert result.kv_length == 6 + len(result.tokens)
    assert h.engine.store.pages.owned == -(-result.kv_length // 4)


def test_rows_of_different_steps_share_the_forwards_they_both_need(h: Harness) -> None:
    h.step(opening(1, PROMPT), opening(2, PROMPT[::-1]))
    result = h.step(row(1, 6, steps=3), row(2, 6))
    assert h.backend.forwards[-3:] == [[1, 1], [1], [1]]
    assert [len(r.tokens) for r in result.rows] == [3, 1]


def test_logprobs_of_several_steps_are_one_array(h: Harness) -> None:
    h.row(opening(1, PROMPT, logprobs=0))
    result = h.row(row(1, 6, steps=3))
    assert result.logprobs is not None
    assert result.logprobs.tolist() == [-t for t in result.tokens]


def test_logprobs_of_a_verify_row_cover_the_emitted_tokens_alone(h: Harness) -> None:
    h.row(opening(1, PROMPT, logprobs=0))
    result = h.row(row(1, 6, drafts=[continuation(PROMPT, 2)[1], 96, 96]))
    assert result.logprobs is not None
    assert result.logprobs.tolist() == [-t for t in result.tokens]
    assert len(result.tokens) == 2


def test_none_fills_the_cache_and_samples_nothing(h: Harness) -> None:
    result = h.row(opening(1, PROMPT, output=OutputMode.NONE))
    assert (result.kv_length, result.tokens) == (6, [])
    assert h.row(row(1, 6, tokens=[1])).tokens == continuation([*PROMPT, 1], 1)


def test_every_kind_of_row_shares_one_forward(h: Harness) -> None:
    h.step(opening(1, PROMPT), opening(2, [1, 2, 3]), opening(3, PROMPT[::-1], limit=2))
    h.step(row(1, 6), row(2, 3, drafts=[1, 2]), row(3, 2, limit=3), opening(4, [9, 9]))
    assert h.backend.forwards[-1] == [1, 3, 3, 2]


def test_truncate_forgets_pending_tokens_and_frees_pages_at_once(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    free = h.engine.store.pages.free
    assert h.op(Truncate(1, 3)).kv_length == 3
    assert h.engine.store.pages.free + h.engine.store.pages.cached == free + 1
    refusal = h.row(row(1, 3)).refusal
    assert refusal is not None
    assert refusal.reason is Reason.INVALID
    assert h.row(row(1, 3, tokens=[50])).tokens == continuation([*PROMPT[:3], 50], 1)


def test_truncate_to_nothing_starts_again(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    h.op(Truncate(1, 0))
    assert h.row(row(1, 0, tokens=[4])).tokens == continuation([4], 1)


def test_forks_and_their_source_go_separate_ways(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    assert h.op(fork(1, 2, 5, seed=3)).kv_length == 5
    result = h.step(row(1, 6), row(2, 5, tokens=[PROMPT[5]]))
    assert result.rows[0].tokens == continuation(PROMPT, 2)[1:]
    assert result.rows[1].tokens == continuation(PROMPT, 1, seed=3)
    assert h.backend.copied, "the shared page was written without a copy"
    assert h.row(row(2, 6)).tokens == continuation(PROMPT, 2, seed=3)[1:]


def test_a_fork_outlives_its_source(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    h.step(ops=(fork(1, 2, 6), Release((1,))))
    assert h.row(row(2, 6, tokens=[1])).tokens == continuation([*PROMPT, 1], 1)


REFUSALS = [
    (row(9, 6), Reason.CACHE, "rows.cache_ids[0]: unknown or released cache 9"),
    (row(1, 5), Reason.KV_LENGTH, "rows.kv_lengths[0]: expected 5, is 6"),
    (row(2, 2, tokens=[1]), Reason.INVALID, "rows.tokens[0]: 4 tokens of the prompt are pending"),
    (row(2, 2, drafts=[1], limit=2), Reason.INVALID, "rows.limits[0]"),
    (row(2, 2, steps=2, limit=2), Reason.INVALID, "rows.limits[0]"),
    (row(1, 6, steps=60), Reason.INVALID, "context length 64"),
    (row(1, 6, drafts=[1] * 40), Reason.TOO_LARGE, "max_step_tokens"),
    (row(1, 6, drafts=[1] * 20), Reason.PAGES, "needs 5 pages, 4 are available"),
    (opening(1, PROMPT), Reason.CACHE_ID_USED, "openings[0].cache_id: 1 was used"),
    (opening(3, PROMPT), Reason.CACHE_ID_USED, "openings[0].cache_id: 3 was used"),
    (opening(9, [1] * 33), Reason.TOO_LARGE, "openings[0].limit"),
    (opening(9, [1] * 17), Reason.PAGES, "openings[0]: needs 5 pages, 4 are available"),
]


@pytest.mark.parametrize(("item", "reason", "message"), REFUSALS)
def test_a_refused_row_changes_nothing_and_its_neighbours_go_on(
    item: Row | Opening, reason: Reason, message: str
) -> None:
    h = Harness(limits(context_length=64, total_pages=9, max_step_tokens=32))
    h.step(
        opening(1, PROMPT), opening(2, [20, 21, 22, 23, 24, 25], limit=2), opening(3, [1]), opening(4, [30])
    )
    h.op(Release((3,)))
    h.row(opening(5, [40, 41, 42]))  # owned: 2 + 1 + 1 + 1 pages
    before = h.snapshot()
    refused = h.row(item)
    assert refused.refusal is not None
    assert refused.refusal.reason is reason
    assert message in refused.refusal.message
    assert (refused.kv_length, refused.tokens) == (0, [])
    assert h.snapshot() == before
    neighbour = h.step(item, row(4, 1)) if item.cache_id != 4 else None
    assert neighbour is not None
    at = 0 if not hasattr(item, "kv_length") else 1
    assert neighbour.rows[at].tokens == continuation([30], 2)[1:]
    assert h.engine.counters.refused[reason] == 2


def test_duplicates_are_refused_all_of_them_and_only_they(h: Harness) -> None:
    h.step(opening(1, PROMPT), opening(2, [1, 2]))
    before = h.snapshot()
    result = h.step(row(1, 6), row(1, 6), opening(3, [5]), opening(3, [6]))
    assert [r.refusal and r.refusal.reason for r in result.rows] == [Reason.INVALID] * 4
    assert "openings[1].cache_id: cache 3 has more than one row" in str(result.rows[3].refusal)
    assert h.snapshot() == before
    assert h.step(row(2, 2), row(1, 6), row(1, 6)).rows[0].tokens == continuation([1, 2], 2)[1:]


def test_a_row_refused_by_the_codec_keeps_its_place(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    refusal = Refusal(Reason.INVALID, "rows.tokens[0]: ids below 97, has 97")
    result = execute(
        h.engine, StepPlan(rows=planned((refusal, row(1, 6))), openings=(refusal, opening(2, [1])))
    )
    assert [r.refusal for r in result.rows] == [refusal, None, refusal, None]


def test_pages_are_reserved_in_row_order_openings_last() -> None:
    h = Harness(limits(total_pages=3))
    h.row(opening(1, [1, 2, 3, 4]))
    result = h.step(opening(2, [9] * 8), row(1, 4), opening(3, [8] * 4))
    assert [r.refusal and r.refusal.reason for r in result.rows] == [None, Reason.PAGES, None]


def test_sequences_are_limited() -> None:
    h = Harness(limits(max_sequences=2))
    result = h.step(opening(1, [1]), opening(2, [2]), opening(3, [3]))
    assert [r.refusal and r.refusal.reason for r in result.rows] == [None, None, Reason.SEQUENCES]
    refusal = h.op(fork(1, 4, 1)).refusal
    assert refusal is not None
    assert refusal.reason is Reason.SEQUENCES
    h.op(Release((1,)))
    assert h.row(opening(5, [3])).refusal is None


def test_a_row_that_is_not_finite_changes_nothing_and_its_neighbours_go_on(h: Harness) -> None:
    h.step(opening(1, PROMPT), opening(2, [1, 2]))
    h.backend.poisoned = {66}
    before = h.snapshot()
    result = h.step(row(1, 6, tokens=[66]), row(2, 2), opening(3, [3] * 8 + [66]))
    reasons = [r.refusal and r.refusal.reason for r in result.rows]
    assert reasons == [Reason.NOT_FINITE, None, Reason.NOT_FINITE]
    h.op(Truncate(2, 2))
    assert h.row(row(1, 6)).tokens == continuation(PROMPT, 2)[1:], "the sampled token is still pending"
    h.backend.poisoned = set()
    again = h.row(opening(3, [3] * 8 + [66]))
    assert (again.cached_length, again.refusal) == (0, None), "pages of a failed row were published"
    assert before is not None


def test_chunks_publish_nothing_until_an_output_was_finite(h: Harness) -> None:
    h.backend.poisoned = {66}
    prompt = [3] * 8 + [66]
    h.row(opening(1, prompt, limit=8))
    assert h.row(opening(2, prompt, limit=8)).cached_length == 0
    assert h.row(row(1, 8)).refusal is not None
    assert h.row(opening(3, prompt, limit=8)).cached_length == 0


def test_a_multi_step_row_that_fails_midway_takes_everything_back(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    h.backend.poisoned = {continuation(PROMPT, 3)[2]}
    before = h.snapshot()
    refusal = h.row(row(1, 6, steps=6)).refusal
    assert refusal is not None
    assert refusal.reason is Reason.NOT_FINITE
    assert h.snapshot() == before
    h.backend.poisoned = set()
    assert h.row(row(1, 6, steps=6)).tokens == continuation(PROMPT, 7)[1:]


def test_draining_refuses_openings_and_lets_live_caches_go_on(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    h.engine.store.draining = True
    result = h.step(row(1, 6), opening(2, [1]))
    assert [r.refusal and r.refusal.reason for r in result.rows] == [None, Reason.DRAINING]
