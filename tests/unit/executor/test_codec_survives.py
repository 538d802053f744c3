"""Whatever step or bytes arrive, they are answered or refused, and nothing else is ever raised."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.plan import (
    RequestRefused,
)
from executor_service.rpc.codec.forward import decode_forward
from executor_service.rpc.codec.results import encode_result
from executor_service.rpc.codec.rows import (
    BATCH_DECODE,
    BATCH_PREFILL,
    DECODE,
    PREFILL,
    UNIFIED,
    VERIFY,
    Takes,
)
from executor_service.rpc.codec.steps import decode_op, decode_step
from tests.support.engine_steps import execute
from tests.unit.executor.fakes import FakeBackend, limits
from tests.unit.executor.harness import Harness

LIMITS = limits(max_rows=4, context_length=64, max_step_tokens=64, max_adapters=1)
INFO = replace(FakeBackend().info, can_mask_forward=True)


NUMBERS = st.one_of(st.integers(0, 5), st.sampled_from([96, 97, 2**31 - 1, 2**31, 2**32 - 1]))
ARRAYS = st.lists(NUMBERS, max_size=5)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
STEPS = st.builds(
    pb.Step,
    header=st.builds(pb.StepHeader, step_id=st.integers(0, 2), epoch=st.sampled_from([0, 77])),
    ops=st.lists(
        st.one_of(
            st.builds(lambda ids: pb.Op(release=pb.Release(cache_ids=ids)), ARRAYS),
            st.builds(lambda i, n: pb.Op(truncate=pb.Truncate(cache_id=i, length=n)), NUMBERS, NUMBERS),
            st.builds(
                lambda i, j, n: pb.Op(fork=pb.Fork(source_id=i, cache_id=j, length=n)),
                NUMBERS,
                NUMBERS,
                NUMBERS,
            ),
            st.just(pb.Op()),
        ),
        max_size=3,
    ),
    rows=st.one_of(
        st.builds(
            lambda ids, extra: pb.Rows(cache_ids=ids, kv_lengths=[1] * len(ids), **extra),
            st.lists(NUMBERS, max_size=3),
            st.dictionaries(
                st.sampled_from(["limits", "steps", "outputs", "top_ks"]),
                st.lists(st.integers(0, 5), max_size=3),
            ),
        ),
        st.builds(
            pb.Rows,
            cache_ids=ARRAYS,
            kv_lengths=ARRAYS,
            tokens=ARRAYS,
            token_counts=ARRAYS,
            drafts=ARRAYS,
            draft_counts=ARRAYS,
            limits=ARRAYS,
            steps=ARRAYS,
            top_ks=ARRAYS,
        ),
    ),
    openings=st.lists(
        st.builds(
            pb.Opening,
            cache_id=NUMBERS,
            tokens=ARRAYS,
            prompt_length=NUMBERS,
            limit=NUMBERS,
            output=st.integers(0, 5),
            top_k=NUMBERS,
            salt=st.binary(max_size=3),
            sampling=st.builds(
                pb.Sampling, temperature=FLOATS, top_p=FLOATS, logprobs=NUMBERS, stop_token_ids=ARRAYS
            ),
        ),
        max_size=3,
    ),
)
ALL = (PREFILL, BATCH_PREFILL, DECODE, BATCH_DECODE, UNIFIED, VERIFY)


class TestNothingButRefusals:
    """One engine lives through all examples: whatever arrives, it answers, and its books balance."""

    harness = Harness(limits(total_pages=8, max_sequences=4, max_rows=4, context_length=32))

    @settings(max_examples=400, deadline=None)
    @given(step=STEPS, takes=st.sampled_from(ALL))
    def test_any_step_is_answered(self, step: pb.Step, takes: Takes) -> None:
        try:
            plan = decode_step(step, self.harness.engine.limits, takes)
            result = execute(self.harness.engine, plan)
        except RequestRefused:
            return
        encode_result(pb.StepResult(), result, plan, 77)
        assert len(result.rows) == len(plan.rows) + len(plan.openings)
        assert len(result.ops) == len(plan.ops)
        self.harness.engine.store.check()

    @settings(max_examples=300, deadline=None)
    @given(data=st.binary(max_size=200), takes=st.sampled_from(ALL))
    def test_any_bytes_are_answered(self, data: bytes, takes: Takes) -> None:
        for kind in (
            pb.Step,
            pb.TruncateKvRequest,
            pb.ForkCacheRequest,
            pb.ReleaseCacheRequest,
            pb.ForwardRequest,
        ):
            try:
                request = kind.FromString(data)
            except DecodeError:
                continue
            try:
                if isinstance(request, pb.Step):
                    execute(self.harness.engine, decode_step(request, LIMITS, takes))
                elif isinstance(request, pb.ForwardRequest):
                    decode_forward(request, LIMITS, INFO)
                else:
                    execute(self.harness.engine, decode_op(request, LIMITS))
            except RequestRefused:
                continue
