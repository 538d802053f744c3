"""Random plans, given up at random and sent again: whoever never gave up can not tell the difference."""

from __future__ import annotations

from functools import partial

from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor_service.backends.base import Backend
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.contract.plan import Abandoned, StepPlan
from tests.support.engine_steps import BegunStep, begin
from tests.unit.executor.deferred import DeferredBackend
from tests.unit.executor.fakes import FakeBackend, limits
from tests.unit.executor.harness import Harness
from tests.unit.executor.two_ways import POISON, SEEDS, TwoWays


class Impatient(TwoWays):
    """The second engine computes in pieces, for clients that leave and come again."""

    abandoned = 0

    def __init__(
        self, seed: int, piece: int, backends: tuple[Backend, Backend] | None, poison: frozenset[int]
    ) -> None:
        bounds = {"total_pages": 600, "context_length": 48}
        super().__init__(seed, limits(**bounds), poison, backends=backends)
        self.overlapped = Harness(limits(**bounds, max_piece_tokens=piece), self.overlapped.backend)

    def begin(self, plan: StepPlan) -> BegunStep:
        harness = self.overlapped
        while True:
            patience = iter([True] * self.random.choice((0, 1, 2, 3, 9)))
            if self.random.random() < 0.5:
                return begin(harness.engine, plan)
            harness.engine.pipeline.settle()  # so that nothing else changes meanwhile
            before = harness.snapshot()
            try:
                return begin(harness.engine, plan, partial(next, patience, False), abandonable=True)
            except Abandoned:
                self.abandoned += 1
                harness.engine.store.check()
                assert harness.snapshot() == before


@given(
    seed=SEEDS, steps=st.integers(1, 25), piece=st.integers(1, 9), late=st.booleans(), poison=st.booleans()
)
@example(seed=127, steps=7, piece=5, late=False, poison=True)  # a poisoned prompt in two pieces
@settings(max_examples=120, deadline=None)
def test_steps_given_up_and_sent_again_answer_like_steps_sent_once(
    seed: int, steps: int, piece: int, late: bool, poison: bool
) -> None:
    fakes = FakeBackend(48), (DeferredBackend if late else FakeBackend)(48)
    for fake in fakes:
        fake.poisoned = set(POISON if poison else ())
    Impatient(seed, piece, fakes, frozenset()).run(steps)


@given(seed=SEEDS, steps=st.integers(1, 25), piece=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_so_they_do_on_the_oracle(seed: int, steps: int, piece: int) -> None:
    Impatient(seed, piece, (OracleBackend(), OracleBackend()), frozenset()).run(steps)


def test_many_of_these_steps_are_given_up() -> None:
    abandoned = 0
    for seed in range(16):
        ways = Impatient(seed, 3, None, frozenset())
        ways.run(25)
        abandoned += ways.abandoned
    assert abandoned > 50
