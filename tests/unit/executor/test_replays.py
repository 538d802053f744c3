"""The output of an opening is read by its grammar in parts, and no step waits for more than one of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.config import ExecutorConfig
from executor_service.contract.grammar import GrammarStuck
from executor_service.contract.plan import Fork, Opening, Reason, Release, RowResult, Sampling, TokenIds
from executor_service.grammar import replays as module
from executor_service.grammar.replays import STEP_S
from executor_service.runtime.runtime import Runtime
from tests.unit.executor.fakes import limits
from tests.unit.executor.harness import Harness, opening, row
from tests.unit.executor.table_grammar import END, VOCABULARY, TableGrammar, TableMatcher, loops
from tests.unit.executor.test_engine_grammar import PROMPT, constrained, solo

TOKEN_S = STEP_S / 8
PER_STEP = 8
"""Tokens that a step may read at most; the first opening in it half of them."""
OUTPUT = [11, 11] * 30


class Slow:
    """An engine whose grammar takes about a millisecond for a token."""

    def __init__(self, grammar: TableGrammar | None = None, total_pages: int = 64) -> None:
        self.grammar = grammar or loops()
        bounds = limits(vocab_size=VOCABULARY, total_pages=total_pages)
        self.h = Harness(bounds, OracleBackend(), lambda: TOKEN_S * self.grammar.consumed)
        self.last_id = 100  # of a cache

    def opening(self, output: list[int], **other: int) -> Opening:
        """Under a new cache id."""
        self.last_id += 1
        return constrained(self.last_id, PROMPT + output, self.grammar, **other)

    def idle(self) -> None:
        """The device thread has nothing else to do for a while."""
        pipeline = self.h.engine.pipeline
        while pipeline.has_replays:
            read = self.grammar.consumed
            pipeline.go_on_replaying()
            assert self.grammar.consumed - read <= PER_STEP // 2

    def attempts(
        self, attempt: Callable[[], RowResult], *, alone: bool = True, idle: bool = False
    ) -> tuple[int, RowResult]:
        """How often something was refused because of its replay, and the answer after that.

        Each time the step reads few tokens and, if nothing else is in it, changes nothing.
        """
        for refusals in range(1000):
            if idle:
                self.idle()
            before, read = self.h.snapshot(), self.grammar.consumed
            result = attempt()
            assert self.grammar.consumed - read <= PER_STEP
            if result.refusal is None or result.refusal.reason is not Reason.GRAMMAR_BEHIND:
                return refusals, result
            assert not alone or self.h.snapshot() == before
        raise AssertionError("no end")


def test_a_step_reads_a_bounded_part_of_an_output_and_its_other_rows_go_on() -> None:
    slow, length = Slow(), 2
    slow.h.row(opening(1, [1, 2]))
    free: list[int] = []

    def attempt() -> RowResult:
        nonlocal length
        answer = slow.h.step(row(1, length), slow.opening(OUTPUT)).rows
        free.extend(answer[0].tokens)
        length += 1
        return answer[1]

    refusals, opened = slow.attempts(attempt, alone=False)
    assert refusals == len(OUTPUT) // (PER_STEP // 2) - 1
    assert opened.tokens == [solo(PROMPT + OUTPUT, 0)]
    assert len(free) == refusals + 1
    assert slow.grammar.consumed == len(OUTPUT) + 1, "read once, and the token that was sampled"


def test_openings_of_one_step_share_its_time() -> None:
    """The first takes most of it, and the others go on all the same."""
    slow = Slow()
    openings = [slow.opening([11, 11] * (20 + n)) for n in range(3)]
    while (refusals := [result.refusal for result in slow.h.step(*openings).rows]) and all(refusals):
        pass
    assert slow.grammar.consumed > 40 + 2 * 10
    assert [refusal is None for refusal in refusals] == [True, False, False]


def test_what_a_part_takes_beyond_its_time_is_saved_up_before_the_next_and_others_go_on() -> None:
    hostile, honest = loops(), loops()

    def clock() -> float:
        return TOKEN_S * (64 * hostile.consumed + honest.consumed)

    h = Harness(limits(vocab_size=VOCABULARY), OracleBackend(), clock)
    for step in range(1, 34):
        openings = (constrained(2 * step + n, PROMPT + OUTPUT, g) for n, g in enumerate((hostile, honest)))
        refusals = [result.refusal for result in h.step(*openings).rows]
        assert refusals[0] is not None
        assert (refusals[1] is None) == (step in (16, 31)), "4 tokens a step from the second on"
        assert hostile.consumed == (2 if step < 33 else 4)


def test_what_was_read_is_kept_where_an_opening_is_refused_for_pages() -> None:
    slow = Slow(total_pages=20)
    slow.h.row(opening(1, list(range(60))))
    _, refused = slow.attempts(lambda: slow.h.row(slow.opening(OUTPUT)))
    assert refused.refusal is not None
    assert refused.refusal.reason is Reason.PAGES
    slow.h.row(row(1, 60, steps=2))
    read = slow.grammar.consumed
    for _ in range(3):
        slow.h.row(slow.opening(OUTPUT))
    assert slow.grammar.consumed == read


def test_a_replay_goes_on_where_the_output_has_grown_meanwhile() -> None:
    slow = Slow()
    lengths = iter(range(40, 61, 2))
    _, opened = slow.attempts(lambda: slow.h.row(slow.opening(OUTPUT[: next(lengths, 60)])))
    assert opened.tokens == [solo(PROMPT + OUTPUT, 0)]
    assert slow.grammar.consumed == len(OUTPUT) + 1, "read once, and the token that was sampled"


def test_a_replay_is_not_lost_to_an_output_that_goes_on_behind_it() -> None:
    """It takes what the shorter one has read, once; then each goes on with its own."""
    slow = Slow()
    for _ in range(8):
        both = slow.h.step(slow.opening(OUTPUT[:30]), slow.opening(OUTPUT)).rows
        assert both[0].refusal is not None
        assert both[1].refusal is not None
    assert slow.h.row(slow.opening(OUTPUT[:30])).refusal is None
    read = slow.grammar.consumed
    slow.attempts(lambda: slow.h.row(slow.opening(OUTPUT)))
    assert slow.grammar.consumed - read == len(OUTPUT) - 4 - 8 * 2 + 1


def test_a_replay_goes_on_while_nothing_else_is_to_be_done() -> None:
    slow = Slow()
    slow.h.row(slow.opening(OUTPUT))
    slow.h.row(slow.opening(OUTPUT[:20]))
    slow.idle()
    read = slow.grammar.consumed
    assert slow.h.row(slow.opening(OUTPUT)).tokens == [solo(PROMPT + OUTPUT, 0)]
    assert slow.h.row(slow.opening(OUTPUT[:20])).tokens == [solo(PROMPT + OUTPUT[:20], 0)]
    assert slow.grammar.consumed == read + 2, "the tokens that were sampled"


@pytest.mark.parametrize("idle", [False, True])
def test_refusals_are_those_of_a_replay_at_once(idle: bool) -> None:
    at_once = Harness(limits(vocab_size=VOCABULARY), OracleBackend())

    def stuck() -> TableGrammar:
        grammar = loops()
        grammar.stuck_after = 50
        return grammar

    for grammar, output in ((loops, [*OUTPUT, 99, 11]), (stuck, OUTPUT)):
        slow = Slow(grammar())

        def attempt(slow: Slow = slow, output: list[int] = output) -> RowResult:
            return slow.h.row(slow.opening(output))

        refusals, refused = slow.attempts(attempt, idle=idle)
        assert refusals == (1 if idle else 12 if grammar is stuck else 15)
        assert refused.refusal == at_once.row(constrained(1, PROMPT + output, grammar())).refusal


def test_a_matcher_that_is_stuck_amid_a_sequence_is_replaced_in_parts_and_no_token_differs() -> None:
    slow, plain = Slow(), Slow()
    for each in (slow, plain):
        _, opened = each.attempts(lambda each=each: each.h.row(each.opening(OUTPUT)))  # type: ignore[misc]
        assert opened.tokens == [solo(PROMPT + OUTPUT, 0)]
    slow.grammar.stuck_after = 75  # some tokens later, each of which is consumed, masked and looked behind
    refusals = 0
    for length in range(65, 72):
        again, result = slow.attempts(lambda length=length: slow.h.row(row(slow.last_id, length)))  # type: ignore[misc]
        refusals += again
        assert result.tokens == plain.h.row(row(plain.last_id, length)).tokens != []
    assert refusals
    assert slow.grammar.matchers > 1


def test_decoding_is_not_refused_where_others_have_used_up_the_time() -> None:
    slow = Slow()
    slow.h.row(constrained(1, PROMPT, slow.grammar))
    for length in range(5, 30):
        answer = slow.h.step(row(1, length), *(slow.opening([11, 11] * (40 + n)) for n in range(3))).rows
        assert len(answer[0].tokens) == 1


def test_a_fork_with_output_is_refused_until_its_grammar_has_read_it() -> None:
    slow = Slow()
    free = Opening(1, np.array(PROMPT + OUTPUT, np.int32), 5, 0, Sampling())
    slow.h.row(free)

    def attempt() -> RowResult:
        result = slow.h.op(Fork(1, 2, 5 + len(OUTPUT), Sampling(grammar=slow.grammar)))
        return RowResult(refusal=result.refusal)

    refusals, forked = slow.attempts(attempt)
    assert refusals == 14
    assert forked.refusal is None
    assert slow.h.row(row(2, 65, tokens=[11])).refusal is None


def test_what_nobody_asks_for_again_is_forgotten() -> None:
    slow = Slow()
    replays = slow.h.engine.store.replays
    slow.h.row(slow.opening(OUTPUT))
    slow.h.clock.now_s = 9.0
    slow.h.engine.expire()
    assert replays.unfinished
    slow.h.clock.now_s = 11.0
    slow.h.engine.expire()
    assert not replays.unfinished
    session = slow.h.engine.open_session(0, 0, "")
    slow.h.row(slow.opening(OUTPUT), session=session.id)
    assert replays.unfinished
    slow.h.engine.close_session(session.id)
    assert not replays.unfinished


def test_attempts_of_another_session_begin_anew() -> None:
    """How long somebody else's output is remembered tells nobody anything."""
    slow = Slow()
    session = slow.h.engine.open_session(0, 0, "")
    for _ in range(14):
        slow.h.row(slow.opening(OUTPUT))
    assert slow.h.row(slow.opening(OUTPUT), session=session.id).refusal is not None
    assert slow.h.row(slow.opening(OUTPUT)).refusal is None


def test_of_more_attempts_than_are_kept_the_first_are_done_first_and_all_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    slow = Slow()
    replays = slow.h.engine.store.replays
    outputs = [[11, 11] * n + [10, 12, 14, 15] for n in range(5, 10)]
    waiting, rounds = list(outputs), 0
    while waiting:
        again = []
        for output in waiting:
            result = slow.h.row(slow.opening(output))
            if result.refusal is None:
                slow.h.op(Release((slow.last_id,)))
            else:
                again.append(output)
            assert len(replays) <= 3
        waiting, rounds = again, rounds + 1
    assert rounds <= 2 * len(outputs[-1]) // 4


def test_an_attempt_that_is_not_repeated_gives_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    slow = Slow()
    for n in range(3):
        slow.h.row(slow.opening([11, 11] * n + [10, 12, 14, 15] + OUTPUT))
    slow.h.clock.now_s = 2.0
    refusals, _ = slow.attempts(lambda: slow.h.row(slow.opening(OUTPUT)))
    assert refusals == 14


def test_another_matcher_decides_alone_where_others_may_be_the_reason() -> None:
    """Also where others join the one that replays between two parts."""
    asked: list[bool] = []

    class Shared(TableGrammar):
        def matcher(self, *, alone: bool = False) -> TableMatcher:
            asked.append(alone)
            return Disturbed(self, alone=alone)

    class Disturbed(TableMatcher):
        def __init__(self, grammar: TableGrammar, *, alone: bool) -> None:
            super().__init__(grammar)
            self._alone = alone

        def consume(self, tokens: TokenIds) -> int:
            if not self._alone and len(self._states) > 30:
                raise GrammarStuck("a matcher beside this one was stuck", by_others=True)
            return super().consume(tokens)

    slow = Slow(Shared(loops().table, {0, 4}, end=END))
    _, opened = slow.attempts(lambda: slow.h.row(slow.opening(OUTPUT)))
    assert opened.tokens == [solo(PROMPT + OUTPUT, 0)]
    assert asked == [False, True]


async def test_executors_limit_replays_by_the_cpu_time_of_the_device_thread() -> None:
    runtime = Runtime.from_config(
        ExecutorConfig.model_validate({"backend": "oracle", "pages": 16, "vocab_size": 8})
    )
    await runtime.load()
    assert runtime.loaded.engine.store.replays.budget.clock is time.thread_time
    runtime.close()
