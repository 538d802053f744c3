"""Random plans, one step after another and two at a time: every answer is the same, the books balance."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.adapters.registry import LoadedAdapter
from executor_service.adapters.weights import AdapterWeights
from executor_service.backends.oracle_backend.clocked_oracle import oracle_of
from executor_service.backends.oracle_backend.oracle import HIDDEN_SIZE
from executor_service.backends.oracle_backend.settings import OracleSettings
from tests.unit.executor.deferred import DeferredBackend
from tests.unit.executor.fakes import limits
from tests.unit.executor.two_ways import POISON, SEEDS, TwoWays


@given(seed=SEEDS, steps=st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_two_at_a_time_answer_like_one_after_another(seed: int, steps: int) -> None:
    TwoWays(seed, limits(total_pages=600, context_length=48)).run(steps)


@given(seed=SEEDS, steps=st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_so_they_do_where_rows_fail(seed: int, steps: int) -> None:
    TwoWays(seed, limits(total_pages=600, context_length=48), POISON).run(steps)


@given(seed=SEEDS, steps=st.integers(1, 25), pages=st.integers(6, 30), poison=st.booleans())
@settings(max_examples=60, deadline=None)
def test_so_they_do_where_pages_sequences_and_tokens_are_short(
    seed: int, steps: int, pages: int, poison: bool
) -> None:
    bounds = limits(total_pages=pages, context_length=48, max_sequences=6, max_step_tokens=24)
    TwoWays(seed, bounds, POISON if poison else frozenset(), share=False).run(steps)


@given(seed=SEEDS, steps=st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_so_they_do_on_the_oracle_and_a_device_that_is_one(seed: int, steps: int) -> None:
    configs = (OracleSettings(nan_on_token=95), OracleSettings(nan_on_token=95, token_us=0.01))
    backends = oracle_of(configs[0]), oracle_of(configs[1])
    assert [backend.max_pending_forwards for backend in backends] == [1, 2]
    try:
        ways = TwoWays(seed, limits(total_pages=600, context_length=48), backends=backends)
        ways.run(steps)
    finally:
        backends[1].close()


@given(seed=SEEDS, steps=st.integers(1, 25), slots=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_so_they_do_for_prompts_with_adapters_scores_and_vectors(seed: int, steps: int, slots: int) -> None:
    """Where slots for adapters are short, and so is a reply's room for scores."""
    configs = (OracleSettings(nan_on_token=95), OracleSettings(nan_on_token=95, token_us=0.01))
    backends = oracle_of(configs[0]), oracle_of(configs[1])
    bounds = limits(
        total_pages=600,
        context_length=48,
        max_adapters=4,
        max_adapter_bytes=9,
        max_adapter_slots=slots,
        can_score=True,
        hidden_size=HIDDEN_SIZE,
        max_full_logits_bytes=80,
    )
    try:
        ways = TwoWays(seed, bounds, backends=backends)
        weights = [AdapterWeights(bytes([number]) * 32, 4, 1.0, ()) for number in range(1, 5)]
        for harness in (ways.serial, ways.overlapped):
            for one in weights:
                harness.engine.store.adapters.add(one.fingerprint.hex(), LoadedAdapter(one, one))
        ways.client.adapters = (b"", *(one.fingerprint for one in weights))
        ways.client.asks_of_prompts = True
        ways.run(steps)
    finally:
        backends[1].close()


def test_rows_do_follow_others_in_these_plans() -> None:
    followed = launches = masked_later = open_lengths = 0
    for seed in range(20):
        ways = TwoWays(seed, limits(total_pages=600, context_length=48))
        ways.run(25)
        device = ways.overlapped.backend
        assert isinstance(device, DeferredBackend)
        assert not device.unanswered
        followed, launches = followed + device.followed, launches + device.launches
        masked_later += device.masked_later
        open_lengths += device.open_lengths
    assert open_lengths > launches / 20
    assert followed > launches / 2
    assert masked_later > launches / 8
