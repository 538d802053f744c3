"""Sequences with adapters, step by step over the oracle: a token tells with which one it was computed."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from executor_service.adapters.registry import LoadedAdapter
from executor_service.adapters.weights import AdapterWeights
from executor_service.backends.base import Backend
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.contract.plan import Abandoned, Op, Opening, Reason, RowResult
from tests.support import engine_steps
from tests.unit.executor.deferred import DeferredBackend
from tests.unit.executor.fakes import limits
from tests.unit.executor.harness import Harness, Release, Truncate, fork, opening, plan, row

PROMPT = [5, 6, 7, 8, 9]
LONG = list(range(20, 43))


def fingerprint(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def load(h: Harness, *names: str) -> None:
    for name in names:
        h.engine.store.adapters.add(name, LoadedAdapter(AdapterWeights(fingerprint(name), 4, 1.0, ()), name))


def adapted(cache_id: int, tokens: list[int], name: str = "", limit: int = 0) -> Opening:
    return replace(opening(cache_id, tokens, limit), adapter=fingerprint(name) if name else b"")


class Adapted(Harness):
    """An engine over the oracle with adapters a to d loaded, and two slots."""

    def __init__(self, backend: Backend | None = None, slots: int = 2, **bounds: int) -> None:
        adapters = {"max_adapters": 9, "max_adapter_bytes": 99, "max_adapter_slots": slots}
        oracle = _Oracle(OracleSettings(nan_on_token=99))
        super().__init__(limits(vocab_size=257, **adapters, **bounds), backend or oracle)
        self.slots = self.engine.store.adapters.slots
        load(self, "a", "b", "c", "d")

    def decode(self, cache_id: int, length: int, count: int) -> list[int]:
        return [self.row(row(cache_id, length + i)).tokens[0] for i in range(count)]


class _Oracle(OracleBackend):
    """The oracle, with weights that have only a fingerprint."""

    def load_adapter(self, slot: int, prepared: object) -> None:
        super().load_adapter(slot, AdapterWeights(fingerprint(str(prepared)), 4, 1.0, ()))


def solo(tokens: list[int], name: str, count: int) -> list[int]:
    """The output of an undisturbed run."""
    h = Adapted()
    first = h.row(adapted(1, tokens, name)).tokens
    return first + h.decode(1, len(tokens), count - 1)


def refusal(result: RowResult) -> tuple[Reason, str]:
    assert result.refusal is not None
    return result.refusal.reason, result.refusal.message


def test_rows_of_several_adapters_and_of_none_are_computed_side_by_side_as_each_alone() -> None:
    h = Adapted()
    names = {1: "a", 2: "", 3: "b", 4: "a"}
    answers = h.step(*(adapted(cache_id, [*PROMPT, cache_id], name) for cache_id, name in names.items())).rows
    outputs = {cache_id: answer.tokens for cache_id, answer in zip(names, answers, strict=True)}
    for length in (6, 7, 8):
        order = (3, 1, 4, 2) if length % 2 else (1, 2, 3, 4)
        for cache_id, answer in zip(order, h.step(*(row(i, length) for i in order)).rows, strict=True):
            outputs[cache_id] += answer.tokens
    for cache_id, name in names.items():
        assert outputs[cache_id] == solo([*PROMPT, cache_id], name, 4)
    assert len({tuple(solo(PROMPT, name, 4)) for name in ("", "a", "b")}) == 3
    found = h.engine.store.adapters.find(fingerprint("a"))
    assert found is not None
    assert (found.caches, found.rows, found.tokens) == (2, 8, 2 * (6 + 3))


def test_an_adapter_that_is_not_loaded_refuses_its_opening_alone() -> None:
    h = Adapted()
    good, bad = h.step(adapted(1, PROMPT, "a"), adapted(2, PROMPT, "unknown")).rows
    assert good.refusal is None
    name = fingerprint("unknown").hex()[:16]
    assert refusal(bad) == (Reason.ADAPTER, f"openings[1].adapter: {name}... is not loaded")


def test_slots_are_those_of_live_caches_and_the_next_adapter_waits_for_one() -> None:
    h = Adapted()
    h.step(adapted(1, PROMPT, "a"), adapted(2, PROMPT, "b"), adapted(3, [1], "a"))
    before = h.snapshot()
    reason, message = refusal(h.row(adapted(4, LONG, "c")))
    assert reason is Reason.ADAPTER_SLOTS
    assert message == "openings[0].adapter: all 2 slots (max_adapter_slots) hold adapters of live caches"
    assert h.snapshot() == before
    h.op(Release((1,)))
    assert refusal(h.row(adapted(4, LONG, "c")))[0] is Reason.ADAPTER_SLOTS  # 3 has it, too
    result = h.step(adapted(4, LONG, "c"), ops=(Release((3,)),))
    assert result.rows[0].tokens == solo(LONG, "c", 1)
    assert (h.slots.used, h.slots.hits, h.slots.loads, h.slots.evictions) == (2, 1, 3, 1)
    h.op(Release((2, 4)))
    assert h.slots.used == 0


def test_pages_are_shared_under_the_same_adapter_only() -> None:
    h = Adapted()
    prompt = PROMPT * 2
    for name in ("a", "b", ""):
        cold = h.row(adapted(ord(name or "0"), prompt, name))
        assert (cold.cached_length, cold.tokens) == (0, solo(prompt, name, 1))
    for name in ("a", "b", ""):
        warm = h.row(adapted(ord(name or "0") + 100, prompt, name))
        assert (warm.cached_length, warm.tokens) == (8, solo(prompt, name, 1))


def test_a_fork_has_its_sources_adapter_whatever_becomes_of_both() -> None:
    h = Adapted()
    h.row(adapted(1, PROMPT, "a"))
    h.step(ops=(fork(1, 2, 4), Release((1,))))
    h.engine.store.adapters.remove("a")
    expected = solo(PROMPT, "a", 3)
    assert h.row(row(2, 4, tokens=PROMPT[4:])).tokens + h.decode(2, 5, 2) == expected
    h.step(ops=(fork(2, 3, 4), Release((2,))))
    assert h.row(row(3, 4, tokens=PROMPT[4:])).tokens == expected[:1]


def test_sequences_go_on_with_an_adapter_that_is_unloaded_and_the_last_one_frees_it() -> None:
    h = Adapted(slots=2)
    h.step(adapted(1, PROMPT, "a"), adapted(2, PROMPT, "b"))
    store = h.engine.store.adapters
    assert store.remove("a")
    assert not store.remove("a")
    assert refusal(h.row(adapted(3, PROMPT, "a")))[0] is Reason.ADAPTER
    assert refusal(h.row(adapted(3, PROMPT, "c")))[0] is Reason.ADAPTER_SLOTS
    assert h.decode(1, 5, 3) == solo(PROMPT, "a", 4)[1:]
    load(h, "a")  # the same content: it never went away
    assert h.row(adapted(3, PROMPT, "a")).cached_length == 4
    store.remove("a")
    h.op(Release((1, 3)))
    assert fingerprint("a") not in store.registry.adapters
    assert h.row(adapted(4, PROMPT, "c")).tokens == solo(PROMPT, "c", 1)


def test_a_row_that_is_not_finite_leaves_no_slot_behind() -> None:
    h = Adapted()
    assert refusal(h.row(adapted(1, [5, 99], "a")))[0] is Reason.NOT_FINITE
    assert h.slots.used == 0


def test_an_opening_that_is_refused_for_pages_takes_no_slot() -> None:
    h = Adapted(total_pages=2)
    assert refusal(h.row(adapted(1, LONG, "a")))[0] is Reason.PAGES
    assert (h.slots.used, h.slots.loads) == (0, 0)


def given_up(h: Harness, *items: Opening, ops: tuple[Op, ...] = ()) -> None:
    answers = iter((True, False))
    with pytest.raises(Abandoned):
        engine_steps.begin(h.engine, plan(*items, ops=ops), lambda: next(answers), abandonable=True)
    h.engine.store.check()


def test_a_step_that_is_given_up_leaves_adapters_as_they_were() -> None:
    h = Adapted(max_piece_tokens=4, slots=3)
    h.step(adapted(1, PROMPT, "a"), adapted(2, PROMPT, "b"))
    h.engine.store.adapters.remove("a")
    state = h.snapshot()
    given_up(h, adapted(9, LONG, "c"))
    given_up(h, adapted(9, LONG, "b"), ops=(Release((2,)),))
    given_up(h, adapted(9, LONG, "c"), ops=(Release((1,)), Truncate(2, 3), fork(2, 8, 1)))
    assert h.snapshot() == state
    assert h.slots.used == 2
    assert h.decode(1, 5, 2) == solo(PROMPT, "a", 3)[1:]
    assert h.decode(2, 5, 2) == solo(PROMPT, "b", 3)[1:]


def test_a_step_that_needs_the_slot_that_it_frees_is_not_given_up() -> None:
    h = Adapted(max_piece_tokens=4, slots=1)
    h.row(adapted(1, PROMPT, "a"))
    what = plan(adapted(9, LONG, "c"), ops=(Release((1,)),))
    result = engine_steps.begin(h.engine, what, lambda: False, abandonable=True).finish()
    assert result.rows[0].tokens == solo(LONG, "c", 1)
    h.engine.store.check()


def test_leases_that_run_out_free_slots() -> None:
    h = Adapted()
    h.row(adapted(1, PROMPT, "a"))
    h.clock.now_s = 11.0
    assert h.engine.expire() == 1
    h.engine.store.check()
    assert h.slots.used == 0


@pytest.mark.parametrize(("name", "in_flight"), [("a", 1), ("b", 2), ("", 2)])
def test_an_opening_waits_for_the_prefix_of_its_own_adapter_only(name: str, in_flight: int) -> None:
    h = Adapted(DeferredBackend())
    h.begin(adapted(1, [9] * 5, "a"))
    h.begin(adapted(2, [9] * 5, name))
    assert len(h.engine.pipeline) == in_flight
