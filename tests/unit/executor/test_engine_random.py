"""Random schedules over a small pool: every answer is what an undisturbed run says, the books balance."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor_service.contract.plan import OutputMode, Reason, Row, Truncate
from tests.unit.executor.fakes import limits, next_token
from tests.unit.executor.harness import Harness, Release, fork, opening, row

PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=14)
POISON = 90


class Known:
    def __init__(self, tokens: list[int], length: int, seed: int) -> None:
        self.tokens, self.length, self.seed, self.sampled = tokens, length, seed, False


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.h = Harness(limits(total_pages=14, context_length=40, max_sequences=6))
        self.h.backend.poisoned = {POISON}
        self.live: dict[int, Known] = {}
        self.next_id = 0

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.live)))

    def expect(self, known: Known, length: int) -> int:
        return next_token(known.tokens[:length], known.seed)

    @rule(prompt=PROMPTS, limit=st.integers(0, 6), seed=st.integers(0, 2), poison=st.booleans())
    def open(self, prompt: list[int], limit: int, seed: int, poison: bool) -> None:
        cache_id = self.new_id()
        tokens = prompt + [POISON] * poison
        answer = self.h.row(opening(cache_id, tokens, limit, seed=seed))
        if answer.refusal is not None:
            assert answer.refusal.reason in (Reason.PAGES, Reason.SEQUENCES, Reason.NOT_FINITE)
            assert poison or answer.refusal.reason is not Reason.NOT_FINITE
            return
        known = Known(list(tokens), answer.kv_length, seed)
        left = len(tokens) - answer.cached_length
        assert answer.kv_length == answer.cached_length + (min(limit, left) if limit else left)
        self.live[cache_id] = known
        self.took(known, answer.tokens, complete=answer.kv_length == len(tokens))

    def took(self, known: Known, emitted: list[int], *, complete: bool) -> None:
        assert len(emitted) == complete
        if complete:
            assert emitted == [self.expect(known, known.length)]
            known.tokens.append(emitted[0])
        known.sampled = complete

    @precondition(lambda self: self.live)
    @rule(data=st.data(), limit=st.integers(0, 3))
    def go_on(self, data: st.DataObject, limit: int) -> None:
        cache_id = self.some(data)
        known = self.live[cache_id]
        pending = len(known.tokens) - known.length
        answer = self.h.row(row(cache_id, known.length, limit=limit))
        if answer.refusal is not None:
            self.check_refusal(known, answer.refusal.reason, bool(pending), known.length + pending)
            return
        known.length += min(limit, pending) if limit else pending
        assert answer.kv_length == known.length
        self.took(known, answer.tokens, complete=known.length == len(known.tokens))

    def check_refusal(self, known: Known, reason: Reason, possible: bool, end: int) -> None:
        if reason in (Reason.INVALID, Reason.TOO_LARGE):
            assert not possible or end > 40
        elif reason is Reason.NOT_FINITE:
            assert POISON in known.tokens
        else:
            assert reason in (Reason.PAGES, Reason.SEQUENCES)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), right=st.integers(0, 4), wrong=st.integers(0, 4))
    def verify(self, data: st.DataObject, right: int, wrong: int) -> None:
        cache_id = self.some(data)
        known = self.live[cache_id]
        truth = list(known.tokens)
        for _ in range(right + 1):
            truth.append(next_token(truth, known.seed))
        drafts = truth[len(known.tokens) :][:right] + [95] * wrong
        answer = self.h.row(row(cache_id, known.length, drafts=drafts))
        if answer.refusal is not None:
            end = len(known.tokens) + len(drafts)
            self.check_refusal(known, answer.refusal.reason, known.length < len(known.tokens), end)
            return
        emitted = truth[len(known.tokens) :]
        assert answer.tokens[: right + 1] == emitted
        known.tokens += answer.tokens
        known.length, known.sampled = len(known.tokens) - 1, True
        assert answer.kv_length == known.length

    @precondition(lambda self: self.live)
    @rule(data=st.data(), steps=st.integers(2, 6))
    def several(self, data: st.DataObject, steps: int) -> None:
        cache_id = self.some(data)
        known = self.live[cache_id]
        answer = self.h.row(row(cache_id, known.length, steps=steps))
        if answer.refusal is not None:
            end = len(known.tokens) + steps - 1
            self.check_refusal(known, answer.refusal.reason, known.length < len(known.tokens), end)
            return
        for token in answer.tokens:
            assert token == next_token(known.tokens, known.seed)
            known.tokens.append(token)
        known.length, known.sampled = len(known.tokens) - 1, True
        assert answer.kv_length == known.length

    @precondition(lambda self: self.live)
    @rule(data=st.data(), given=st.lists(st.integers(1, 2), min_size=1, max_size=5), sample=st.booleans())
    def give(self, data: st.DataObject, given: list[int], sample: bool) -> None:
        cache_id = self.some(data)
        known = self.live[cache_id]
        output = OutputMode.SAMPLE if sample else OutputMode.NONE
        answer = self.h.row(row(cache_id, known.length, tokens=given, output=output))
        if answer.refusal is not None:
            prompt_pending = known.length < len(known.tokens) and not known.sampled
            self.check_refusal(known, answer.refusal.reason, not prompt_pending, known.length + len(given))
            return
        known.tokens[known.length :] = given
        known.length += len(given)
        assert answer.kv_length == known.length
        if sample:
            self.took(known, answer.tokens, complete=True)
        else:
            known.sampled = False
            assert answer.tokens == []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        cache_id = self.some(data)
        known = self.live[cache_id]
        known.length = data.draw(st.integers(0, known.length))
        del known.tokens[known.length :]
        known.sampled = False
        assert self.h.op(Truncate(cache_id, known.length)).kv_length == known.length

    @precondition(lambda self: self.live)
    @rule(data=st.data(), seed=st.integers(0, 2))
    def fork(self, data: st.DataObject, seed: int) -> None:
        source = self.some(data)
        length = data.draw(st.integers(0, self.live[source].length))
        cache_id = self.new_id()
        answer = self.h.op(fork(source, cache_id, length, seed))
        if answer.refusal is None:
            self.live[cache_id] = Known(self.live[source].tokens[:length], length, seed)
        else:
            assert len(self.live) == 6

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cache_id = self.some(data)
        del self.live[cache_id]
        assert self.h.op(Release((cache_id,))).released == 1

    @precondition(lambda self: len(self.live) > 1)
    @rule()
    def everyone_decodes(self) -> None:
        rows: list[Row] = [row(cache_id, known.length) for cache_id, known in self.live.items()]
        result = self.h.step(*rows)
        for (_, known), answer in zip(self.live.items(), result.rows, strict=True):
            if answer.refusal is None:
                known.length = answer.kv_length
                self.took(known, answer.tokens, complete=True)

    @invariant()
    def lengths_agree(self) -> None:
        caches = self.h.engine.store.sessions.get(0).caches
        assert {i: s.length for i, s in caches.items()} == {i: k.length for i, k in self.live.items()}


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
