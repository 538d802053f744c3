"""Random schedules of sequences with a grammar: each token is that of an engine which has seen nothing else.

Decodes, drafts of every quality, several steps, given tokens, truncations, forks to other grammars, steps
that are given up halfway, steps in pieces.
"""

from __future__ import annotations

import functools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.contract.plan import Abandoned, Fork, Opening, Reason, Sampling, Truncate
from tests.support import engine_steps
from tests.unit.executor.fakes import limits
from tests.unit.executor.harness import Harness, plan, row
from tests.unit.executor.table_grammar import END, VOCABULARY, TableGrammar, loops

PROMPT = (5, 6, 7)


def grammar(number: int) -> TableGrammar:
    """Two grammars; the words of the second are some of the first's."""
    return (
        loops()
        if number == 0
        else TableGrammar({0: {10: 1, 11: 2}, 1: {12: 3}, 2: {10: 2, 11: 0}, 3: {14: 0}}, {0})
    )


@functools.lru_cache(None)
def allowed(output: tuple[int, ...], number: int) -> frozenset[int]:
    return frozenset(grammar(number).allowed(list(output)))


@functools.lru_cache(None)
def solo(tokens: tuple[int, ...], number: int, seed: int) -> int:
    h = Harness(limits(vocab_size=VOCABULARY), OracleBackend())
    sampling = Sampling(temperature=1.0, seed=seed, grammar=grammar(number))
    (token,) = h.row(Opening(1, np.array(tokens, np.int32), len(PROMPT), 0, sampling)).tokens
    return token


class Known:
    def __init__(self, tokens: list[int], length: int, number: int, seed: int) -> None:
        self.tokens, self.length, self.number, self.seed = tokens, length, number, seed

    @property
    def legal(self) -> bool:
        return fits(self.tokens, self.number)

    def next(self) -> int:
        return solo(tuple(self.tokens), self.number, self.seed)


def fits(tokens: list[int], number: int) -> bool:
    try:
        allowed(tuple(tokens[len(PROMPT) :]), number)
    except ValueError:
        return False
    return True


class GrammarMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.h = Harness(
            limits(vocab_size=VOCABULARY, context_length=60, max_piece_tokens=4), OracleBackend()
        )
        self.grammars = [grammar(0), grammar(1)]
        for each in self.grammars:
            each.stuck_after = 60  # then a replay decides
        self.live: dict[int, Known] = {}
        self.last_id = 0

    def sampling(self, number: int, seed: int) -> Sampling:
        return Sampling(temperature=1.0, seed=seed, grammar=self.grammars[number])

    def one(self, data: st.DataObject) -> tuple[int, Known]:
        cache_id = data.draw(st.sampled_from(sorted(self.live)))
        return cache_id, self.live[cache_id]

    def emitted(self, known: Known, tokens: list[int], length: int) -> None:
        for token in tokens:
            assert token == known.next()
            known.tokens.append(token)
        known.length = length
        assert known.length == len(known.tokens) - 1

    @rule(number=st.integers(0, 1), seed=st.integers(0, 2), again=st.integers(0, 6))
    def open(self, number: int, seed: int, again: int) -> None:
        tokens = list(PROMPT)
        for _ in range(again):
            tokens.append(solo(tuple(tokens), number, seed))
        self.last_id += 1
        opening = Opening(
            self.last_id, np.array(tokens, np.int32), len(PROMPT), 0, self.sampling(number, seed)
        )
        result = self.h.row(opening)
        if result.refusal is not None:
            assert result.refusal.reason in (Reason.SEQUENCES, Reason.PAGES)
            return
        self.live[self.last_id] = known = Known(tokens, 0, number, seed)
        self.emitted(known, result.tokens, len(tokens))

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        right=st.integers(0, 4),
        wrong=st.lists(st.integers(9, 15), max_size=3),
        steps=st.integers(1, 5),
    )
    def go_on(self, data: st.DataObject, right: int, wrong: list[int], steps: int) -> None:
        cache_id, known = self.one(data)
        if len(known.tokens) + 10 > 60:
            return
        ahead = Known(list(known.tokens), 0, known.number, known.seed)
        for _ in range(right):
            ahead.tokens.append(ahead.next())
        drafts = [*ahead.tokens[len(known.tokens) :], *wrong]
        if drafts and steps > 1:
            drafts = []
        result = self.h.row(row(cache_id, known.length, drafts=drafts, steps=steps))
        if result.refusal is not None:
            assert result.refusal.reason is Reason.PAGES
            return
        assert len(result.tokens) == steps if steps > 1 else len(result.tokens) >= 1 + min(right, len(drafts))
        self.emitted(known, result.tokens, result.kv_length)
        output = known.tokens[len(PROMPT) :]
        for token in result.forced:
            assert {token} == allowed(tuple(output), known.number)
            output.append(token)

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(), given=st.lists(st.sampled_from([10, 11, 12, 13, 14, 15, END]), min_size=1, max_size=5)
    )
    def feed(self, data: st.DataObject, given: list[int]) -> None:
        cache_id, known = self.one(data)
        tokens = known.tokens[: known.length] + given
        if len(tokens) > 50:
            return
        before = self.h.snapshot()
        result = self.h.row(row(cache_id, known.length, tokens=given))
        if not fits(tokens, known.number):
            assert result.refusal is not None
            assert result.refusal.reason is Reason.GRAMMAR
            assert self.h.snapshot() == before
        elif result.refusal is None:
            known.tokens = tokens
            self.emitted(known, result.tokens, result.kv_length)

    @rule(count=st.integers(1, 3))
    def prepare(self, count: int) -> None:
        """Masks are computed early, or some of them, or none: nothing depends on it."""
        for _ in range(count):
            self.h.engine.pipeline.prepare_next_mask()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), back=st.integers(1, 8))
    def cut(self, data: st.DataObject, back: int) -> None:
        """Cut, and feed again what stood there."""
        cache_id, known = self.one(data)
        length = max(known.length - back, 1)
        known.length = self.h.op(Truncate(cache_id, length)).kv_length
        given = known.tokens[length : length + 1]
        result = self.h.row(row(cache_id, length, tokens=given))
        assert result.refusal is None
        known.tokens = known.tokens[: length + 1]
        if length + 1 >= len(PROMPT):
            self.emitted(known, result.tokens, result.kv_length)
        else:  # in the middle of the prompt: the rest of it comes now
            del self.live[cache_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), back=st.integers(0, 8), number=st.integers(0, 1), seed=st.integers(0, 2))
    def fork(self, data: st.DataObject, back: int, number: int, seed: int) -> None:
        cache_id, known = self.one(data)
        length = max(known.length - back, len(PROMPT))
        if length > known.length:
            return
        self.last_id += 1
        refusal = self.h.op(Fork(cache_id, self.last_id, length, self.sampling(number, seed))).refusal
        tokens = known.tokens[:length]
        if refusal is not None:
            assert refusal.reason is Reason.SEQUENCES or not fits(tokens, number)
            return
        assert fits(tokens, number)
        following = sorted(allowed(tuple(tokens[len(PROMPT) :]), number))
        fork = self.live[self.last_id] = Known([*tokens, following[-1]], length, number, seed)
        result = self.h.row(row(self.last_id, length, tokens=following[-1:]))
        if result.refusal is not None:
            assert result.refusal.reason is Reason.PAGES
            del self.live[self.last_id]
            return
        self.emitted(fork, result.tokens, result.kv_length)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), patience=st.integers(0, 5), drafts=st.booleans())
    def give_up(self, data: st.DataObject, patience: int, drafts: bool) -> None:
        """A step of several forwards whose client leaves between two of them: nothing has changed."""
        cache_id, known = self.one(data)
        if len(known.tokens) + 10 > 60:
            return
        what = plan(row(cache_id, known.length, steps=6), ops=(Truncate(cache_id, known.length),) * 0)
        left = iter(range(patience))
        before = self.h.snapshot()
        try:
            result = engine_steps.begin(
                self.h.engine, what, lambda: next(left, None) is not None, abandonable=True
            ).finish()
        except Abandoned:
            assert self.h.snapshot() == before
            return
        if result.rows[0].refusal is None:
            self.emitted(known, result.rows[0].tokens, result.rows[0].kv_length)


GrammarMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestGrammars = GrammarMachine.TestCase
