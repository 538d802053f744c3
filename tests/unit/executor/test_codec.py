"""The wire's limits: what is refused, whole or by row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.plan import (
    Fork,
    Opening,
    OutputMode,
    PoolingKind,
    Reason,
    Refusal,
    Release,
    RequestRefused,
    Row,
    Sampling,
    StepPlan,
    Truncate,
)
from executor_service.rpc.codec.forward import decode_forward
from executor_service.rpc.codec.rows import (
    BATCH_DECODE,
    BATCH_PREFILL,
    DECODE,
    PREFILL,
    UNIFIED,
    VERIFY,
    Takes,
)
from executor_service.rpc.codec.sampling import decode_sampling
from executor_service.rpc.codec.steps import decode_step, digest
from tests.unit.executor.fakes import EMPTY, FakeBackend, limits

LIMITS = limits(max_rows=4, context_length=64, max_step_tokens=64, max_adapters=1)


def decode(takes: Takes = UNIFIED, **fields: Any) -> StepPlan:
    return decode_step(pb.Step(**fields), LIMITS, takes)


def message(item: object) -> str:
    assert isinstance(item, Refusal)
    assert item.reason in (Reason.INVALID, Reason.TOO_LARGE)
    return item.message


@pytest.mark.parametrize("grammar", [pb.Grammar(regex="a"), pb.Grammar()])
def test_a_grammar_where_none_is_offered_refuses_its_row_by_name(grammar: pb.Grammar) -> None:
    sampling = pb.Sampling(grammar=grammar)
    plan = decode(
        ops=[pb.Op(fork=pb.Fork(source_id=1, cache_id=2, sampling=sampling))],
        openings=[pb.Opening(cache_id=1, tokens=[1], sampling=sampling), pb.Opening(cache_id=2, tokens=[1])],
    )
    told = "this executor does not offer it"
    assert plan.ops[0] == Refusal(Reason.UNSUPPORTED, f"ops[0].fork.sampling.grammar: {told}")
    assert plan.openings[0] == Refusal(Reason.UNSUPPORTED, f"openings[0].sampling.grammar: {told}")
    assert isinstance(plan.openings[1], Opening)


SCORING = limits(context_length=64, can_score=True, hidden_size=8, max_full_logits_bytes=4 * 97 + 3 * 32)


def test_scores_and_vectors_where_none_are_offered_refuse_their_row_by_name() -> None:
    plan = decode(
        rows=pb.Rows(cache_ids=[1], kv_lengths=[1], outputs=[pb.OUTPUT_MODE_HIDDEN]),
        openings=[
            pb.Opening(cache_id=2, tokens=[1, 2], scored_from=1),
            pb.Opening(cache_id=3, tokens=[1, 2], output=pb.OUTPUT_MODE_HIDDEN),
        ],
    )
    told = "this executor does not offer it"
    assert plan.rows[0] == Refusal(Reason.UNSUPPORTED, f"rows.outputs[0]: {told}")
    assert plan.openings[0] == Refusal(Reason.UNSUPPORTED, f"openings[0].scored_from: {told}")
    assert plan.openings[1] == Refusal(Reason.UNSUPPORTED, f"openings[1].output: {told}")


HEAD = replace(SCORING, can_sample=False, can_score=False, hidden_size=3)


def test_a_model_with_a_classification_head_computes_vectors_and_refuses_every_row_that_samples() -> None:
    modes = [pb.OUTPUT_MODE_UNSPECIFIED, pb.OUTPUT_MODE_SAMPLE, pb.OUTPUT_MODE_TOP_K, pb.OUTPUT_MODE_FULL]
    allowed = [pb.OUTPUT_MODE_NONE, pb.OUTPUT_MODE_HIDDEN]
    told = "this executor does not offer it"
    openings = [
        pb.Opening(cache_id=9 + n, tokens=[1], output=m, top_k=1) for n, m in enumerate(modes + allowed)
    ]
    rows = pb.Rows(cache_ids=range(1, 7), kv_lengths=[1] * 6, outputs=modes + allowed, top_ks=[1] * 6)
    plan = decode_step(pb.Step(rows=rows, openings=openings), HEAD, UNIFIED)
    for n in range(4):
        assert plan.rows[n] == Refusal(Reason.UNSUPPORTED, f"rows.outputs[{n}]: {told}")
        assert plan.openings[n] == Refusal(Reason.UNSUPPORTED, f"openings[{n}].output: {told}")
    assert all(isinstance(row, Row) for row in plan.rows[4:])
    assert all(isinstance(one, Opening) for one in plan.openings[4:])
    for takes in (DECODE, UNIFIED):  # a row that sets nothing samples, also where nothing else is set
        [plain] = decode_step(pb.Step(rows=pb.Rows(cache_ids=[1], kv_lengths=[1])), HEAD, takes).rows
        assert plain == Refusal(Reason.UNSUPPORTED, f"rows.outputs[0]: {told}")
    drafted = pb.Rows(cache_ids=[1], kv_lengths=[1], drafts=[5], draft_counts=[1])
    [row] = decode_step(pb.Step(rows=drafted), HEAD, VERIFY).rows
    assert row == Refusal(Reason.UNSUPPORTED, f"rows.outputs[0]: {told}")
    inputs = [pb.ForwardInput(tokens=[1, 2])]
    info = FakeBackend().info
    for outputs in ([pb.FORWARD_OUTPUT_LOGITS], [pb.FORWARD_OUTPUT_HIDDEN, pb.FORWARD_OUTPUT_LOGITS]):
        with pytest.raises(RequestRefused, match="outputs: LOGITS: this executor") as caught:
            decode_forward(pb.ForwardRequest(inputs=inputs, outputs=outputs), HEAD, info)
        assert caught.value.refusal.reason is Reason.UNSUPPORTED
    decode_forward(pb.ForwardRequest(inputs=inputs, outputs=[pb.FORWARD_OUTPUT_HIDDEN]), HEAD, info)


def test_scores_and_vectors_arrive_whole() -> None:
    hidden: dict[str, Any] = {"output": pb.OUTPUT_MODE_HIDDEN, "tokens": [1, 2]}
    openings = [
        pb.Opening(cache_id=1, tokens=[1, 2, 3], scored_from=2),
        pb.Opening(cache_id=2, **hidden),
        pb.Opening(cache_id=3, pooling=pb.POOLING_LAST, **hidden),
        pb.Opening(cache_id=4, pooling=pb.POOLING_MEAN, scored_from=1, **hidden),
    ]
    decoded = decode_step(pb.Step(openings=openings), SCORING, UNIFIED).openings
    assert [(o.scored_from, o.output, o.pooling, o.max_hit) for o in decoded if isinstance(o, Opening)] == [
        (2, OutputMode.SAMPLE, PoolingKind.LAST, 1),
        (0, OutputMode.HIDDEN, PoolingKind.LAST, 1),
        (0, OutputMode.HIDDEN, PoolingKind.LAST, 1),
        (1, OutputMode.HIDDEN, PoolingKind.MEAN, 0),
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"scored_from": 0}, "scored_from: at least 1 and below the number of tokens, 3, is 0"),
        ({"scored_from": 3}, "scored_from: at least 1 and below the number of tokens, 3, is 3"),
        ({"scored_from": 2**32 - 1}, "scored_from"),
        ({"tokens": [1], "scored_from": 1}, "scored_from: at least 1 and below the number of tokens, 1"),
        ({"scored_from": 1, "sampling": pb.Sampling(logprobs=21)}, "sampling.logprobs"),
        ({"pooling": pb.POOLING_MEAN}, "pooling: only with OUTPUT_MODE_HIDDEN"),
        ({"pooling": pb.POOLING_LAST, "output": pb.OUTPUT_MODE_NONE}, "pooling: only with"),
        ({"pooling": 9, "output": pb.OUTPUT_MODE_HIDDEN}, "pooling: unknown kind 9"),
        ({"output": pb.OUTPUT_MODE_HIDDEN, "mask": b"1" * 13}, "mask: only with OUTPUT_MODE_SAMPLE"),
    ],
)
def test_bad_scores_and_vectors_refuse_their_opening_alone(fields: dict[str, Any], text: str) -> None:
    bad = pb.Opening(**{"cache_id": 1, "tokens": [1, 2, 3], **fields})
    plan = decode_step(pb.Step(openings=[bad, pb.Opening(cache_id=2, tokens=[4])]), SCORING, UNIFIED)
    assert message(plan.openings[0]).startswith(f"openings[0].{text}")
    assert isinstance(plan.openings[1], Opening)


def test_vectors_are_not_for_rows_with_drafts_or_steps() -> None:
    cases: list[dict[str, Any]] = [{"drafts": [1], "draft_counts": [1]}, {"steps": [2]}]
    for fields in cases:
        rows = pb.Rows(cache_ids=[1], kv_lengths=[1], outputs=[pb.OUTPUT_MODE_HIDDEN], **fields)
        (decoded,) = decode_step(pb.Step(rows=rows), SCORING, UNIFIED).rows
        field = "steps" if "steps" in fields else "outputs"
        assert message(decoded).startswith(f"rows.{field}[0]: ")


def test_vectors_count_among_the_bytes_of_full_output() -> None:
    modes = [pb.OUTPUT_MODE_FULL] + [pb.OUTPUT_MODE_HIDDEN] * 3
    rows = pb.Rows(cache_ids=[1, 2, 3, 4], kv_lengths=[1] * 4, outputs=modes)
    decode_step(pb.Step(rows=rows), SCORING, UNIFIED)
    more = pb.Opening(cache_id=5, tokens=[1], output=pb.OUTPUT_MODE_HIDDEN)
    with pytest.raises(RequestRefused, match="516 bytes of FULL and HIDDEN output, at most 484"):
        decode_step(pb.Step(rows=rows, openings=[more]), SCORING, UNIFIED)


def test_a_full_step_arrives_whole() -> None:
    plan = decode(
        header=pb.StepHeader(session_id=5, step_id=6, epoch=7),
        ops=[
            pb.Op(release=pb.Release(cache_ids=[1, 2])),
            pb.Op(truncate=pb.Truncate(cache_id=3, length=4)),
            pb.Op(fork=pb.Fork(source_id=3, cache_id=8, length=2, sampling=pb.Sampling(seed=9))),
        ],
        rows=pb.Rows(
            cache_ids=[10, 11],
            kv_lengths=[1, 2],
            tokens=[4, 5],
            token_counts=[0, 2],
            drafts=[6],
            draft_counts=[1, 0],
            limits=[0, 1],
            steps=[0, 1],
            outputs=[pb.OUTPUT_MODE_UNSPECIFIED, pb.OUTPUT_MODE_TOP_K],
            top_ks=[0, 3],
        ),
        openings=[pb.Opening(cache_id=12, tokens=[1, 2, 3], prompt_length=2, limit=2, salt=b"s")],
    )
    assert (plan.session_id, plan.step_id, plan.epoch, len(plan.digest)) == (5, 6, 7, 32)
    assert plan.ops == (Release((1, 2)), Truncate(3, 4), Fork(3, 8, 2, Sampling(seed=9)))
    first, second = plan.rows
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert (first.tokens.tolist(), first.drafts.tolist(), first.steps) == ([], [6], 1)
    assert (second.tokens.tolist(), second.limit, second.output, second.top_k) == (
        [4, 5],
        1,
        OutputMode.TOP_K,
        3,
    )
    (opening,) = plan.openings
    assert isinstance(opening, Opening)
    assert (opening.tokens.tolist(), opening.prompt_length, opening.salt) == ([1, 2, 3], 2, b"s")


def test_the_usual_step_is_two_arrays() -> None:
    plan = decode(rows=pb.Rows(cache_ids=[1, 2], kv_lengths=[3, 4]))
    assert [repr(row) for row in plan.rows] == [repr(Row(1, 3, EMPTY, EMPTY)), repr(Row(2, 4, EMPTY, EMPTY))]
    assert plan.digest == b""


SHAPES = [
    (UNIFIED, {"rows": pb.Rows(cache_ids=[1], kv_lengths=[])}, "rows.kv_lengths: 0 entries for 1 rows"),
    (UNIFIED, {"rows": pb.Rows(kv_lengths=[1])}, "rows.kv_lengths"),
    (UNIFIED, {"rows": pb.Rows(limits=[1], steps=[2])}, "rows.limits: 1 entries for 0 rows"),
    (UNIFIED, {"rows": pb.Rows(cache_ids=[1], kv_lengths=[1], limits=[1, 2])}, "rows.limits"),
    (UNIFIED, {"rows": pb.Rows(cache_ids=[1], kv_lengths=[1], tokens=[1])}, "rows.token_counts"),
    (
        UNIFIED,
        {"rows": pb.Rows(cache_ids=[1], kv_lengths=[1], tokens=[1], token_counts=[2])},
        "rows.token_counts: they sum to 2, rows.tokens has 1",
    ),
    (
        UNIFIED,
        {"rows": pb.Rows(cache_ids=[1, 2], kv_lengths=[1, 1], token_counts=[2**32 - 1, 2**32 - 1])},
        "rows.token_counts: they sum to 8589934590",
    ),
    (UNIFIED, {"rows": pb.Rows(cache_ids=range(5), kv_lengths=range(5))}, "max_rows"),
    (UNIFIED, {"openings": [pb.Opening()] * 5}, "max_rows"),
    (
        UNIFIED,
        {"rows": pb.Rows(cache_ids=[1], kv_lengths=[1], tokens=[1] * 65, token_counts=[65])},
        "rows.tokens: at most 64",
    ),
    (PREFILL, {}, "exactly one"),
    (PREFILL, {"openings": [pb.Opening()] * 2}, "exactly one"),
    (BATCH_PREFILL, {}, "at least one"),
    (BATCH_PREFILL, {"rows": pb.Rows(cache_ids=[1], kv_lengths=[1], steps=[2])}, "rows.steps"),
    (DECODE, {"openings": [pb.Opening()]}, "openings: this RPC takes none"),
    (
        BATCH_DECODE,
        {"rows": pb.Rows(cache_ids=[1], kv_lengths=[1], drafts=[1], draft_counts=[1])},
        "rows.drafts",
    ),
    (VERIFY, {"rows": pb.Rows(cache_ids=[1], kv_lengths=[1])}, "rows.draft_counts"),
    (UNIFIED, {"ops": [pb.Op(release=pb.Release(cache_ids=range(65_537)))]}, "release.cache_ids"),
    (UNIFIED, {"ops": [pb.Op()] * 16_385}, "ops: at most"),
]


@pytest.mark.parametrize(("takes", "fields", "text"), SHAPES)
def test_a_broken_shape_or_size_refuses_the_step(takes: Takes, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        decode(takes, **fields)
    assert caught.value.refusal.reason in (Reason.INVALID, Reason.TOO_LARGE)
    assert text in caught.value.refusal.message


def test_full_output_is_bounded_in_bytes() -> None:
    bounds = limits(max_full_logits_bytes=4 * 97 * 3)
    rows = pb.Rows(
        cache_ids=[1], kv_lengths=[1], drafts=[1, 1], draft_counts=[2], outputs=[pb.OUTPUT_MODE_FULL]
    )
    decode_step(pb.Step(rows=rows), bounds, UNIFIED)
    openings = [pb.Opening(cache_id=1, tokens=[1], output=pb.OUTPUT_MODE_FULL)]
    with pytest.raises(RequestRefused, match="max_full_logits_bytes"):
        decode_step(pb.Step(rows=rows, openings=openings), bounds, UNIFIED)


ROWS = [
    ({"tokens": [97], "token_counts": [0, 1]}, "rows.tokens[1]: ids below 97, has 97"),
    ({"tokens": [2**32 - 1], "token_counts": [0, 1]}, "rows.tokens[1]: ids below 97, has 4294967295"),
    ({"drafts": [1, 97], "draft_counts": [0, 2]}, "rows.drafts[1]"),
    ({"outputs": [0, 9]}, "rows.outputs[1]: unknown mode 9"),
    ({"outputs": [0, 2]}, "rows.top_ks[1]: 1 to 20 (max_logprobs), is 0"),
    ({"outputs": [0, 2], "top_ks": [0, 21]}, "rows.top_ks[1]"),
    ({"steps": [1, 65]}, "rows.steps[1]: at most 64"),
    ({"steps": [1, 2], "drafts": [1], "draft_counts": [0, 1]}, "rows.steps[1]: not with drafts"),
    ({"steps": [1, 2], "outputs": [0, 3]}, "rows.steps[1]: only with"),
]


@pytest.mark.parametrize(("fields", "text"), ROWS)
def test_a_bad_value_refuses_its_row_alone(fields: dict[str, Any], text: str) -> None:
    plan = decode(rows=pb.Rows(cache_ids=[1, 2], kv_lengths=[1, 1], **fields))
    assert isinstance(plan.rows[0], Row)
    assert text in message(plan.rows[1])


MASK = bytes([2]) + bytes(15)  # of 97 ids: token 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"masks": [MASK[:-1]]}, "rows.masks[0]: 16 bytes, 16 for each of 1 positions, has 15"),
        ({"masks": [MASK], "drafts": [1], "draft_counts": [1]}, "rows.masks[0]: 32 bytes"),
        ({"masks": [bytes(16)]}, "rows.masks[0]: the first mask allows no token"),
        ({"masks": [bytes(15) + b"\x80"]}, "rows.masks[0]: the first mask allows no token"),
        ({"masks": [MASK], "steps": [2]}, "rows.masks[0]: not with several steps"),
        ({"masks": [MASK], "outputs": [pb.OUTPUT_MODE_FULL]}, "rows.masks[0]: only with OUTPUT_MODE_SAMPLE"),
    ],
)
def test_a_bad_mask_refuses_its_row_alone(fields: dict[str, Any], text: str) -> None:
    rows = pb.Rows(**{name: [*values, *values[:0]] for name, values in fields.items()})
    rows.cache_ids.extend([1, 2])
    rows.kv_lengths.extend([3, 4])
    for name in ("masks", "draft_counts", "steps", "outputs"):
        if values := getattr(rows, name):
            values.append(b"" if name == "masks" else type(values[0])(name == "steps"))
    bad, good = decode(rows=rows).rows
    assert message(bad).startswith(text)
    assert isinstance(good, Row)
    assert good.masks is None


def test_a_bad_mask_refuses_its_opening_alone() -> None:
    plan = decode(
        openings=[
            pb.Opening(cache_id=1, tokens=[1], mask=MASK[1:]),
            pb.Opening(cache_id=2, tokens=[1], mask=MASK, output=pb.OUTPUT_MODE_NONE),
            pb.Opening(cache_id=3, tokens=[1], mask=MASK),
        ]
    )
    assert message(plan.openings[0]).startswith("openings[0].mask: 16 bytes")
    assert message(plan.openings[1]) == "openings[1].mask: only with OUTPUT_MODE_SAMPLE"
    assert isinstance(plan.openings[2], Opening)
    assert plan.openings[2].mask is not None
    assert plan.openings[2].mask.tobytes() == MASK


def test_too_many_drafts_refuse_their_row() -> None:
    bounds = limits(max_drafts=2)
    rows = pb.Rows(cache_ids=[1], kv_lengths=[1], drafts=[1] * 3, draft_counts=[3])
    assert "max_drafts" in message(decode_step(pb.Step(rows=rows), bounds, UNIFIED).rows[0])


OPENINGS = [
    ({"cache_id": 0}, "openings[1].cache_id"),
    ({"tokens": []}, "openings[1].tokens: 1 to 64 ids"),
    ({"tokens": [1] * 65}, "openings[1].tokens: 1 to 64 ids"),
    ({"tokens": [97]}, "openings[1].tokens: ids below 97"),
    ({"tokens": [2**32 - 1]}, "openings[1].tokens: ids below 97"),
    ({"prompt_length": 2}, "openings[1].prompt_length: at most 1, is 2"),
    ({"output": 77}, "openings[1].output"),
    ({"output": pb.OUTPUT_MODE_TOP_K}, "openings[1].top_k"),
    ({"salt": b"x" * 257}, "openings[1].salt"),
    ({"adapter": b"x" * 31}, "openings[1].adapter: 32 bytes, has 31"),
    ({"sampling": pb.Sampling(temperature=math.nan)}, "openings[1].sampling.temperature: 0 to 100, is nan"),
]


def test_an_adapter_is_refused_as_not_offered_where_there_are_none() -> None:
    step = pb.Step(openings=[pb.Opening(cache_id=1, tokens=[1], adapter=bytes(32))])
    refusal = decode_step(step, limits(), UNIFIED).openings[0]
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.message) == (
        Reason.UNSUPPORTED,
        "openings[0].adapter: this executor does not offer it",
    )
    (opening,) = decode_step(step, LIMITS, UNIFIED).openings
    assert isinstance(opening, Opening)
    assert opening.adapter == bytes(32)


@pytest.mark.parametrize(("fields", "text"), OPENINGS)
def test_a_bad_opening_is_refused_alone(fields: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {"cache_id": 2, "tokens": [1]}
    plan = decode(openings=[pb.Opening(cache_id=1, tokens=[1]), pb.Opening(**{**good, **fields})])
    assert isinstance(plan.openings[0], Opening)
    assert text in message(plan.openings[1])


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": -0.1},
    {"temperature": 100.1},
    {"top_p": 0.0},
    {"top_p": 1.01},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": math.nan},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": math.inf},
    {"presence_penalty": 101.0},
    {"frequency_penalty": math.nan},
    {"logit_bias": {97: 1.0}},
    {"logit_bias": {1: math.inf}},
    {"logit_bias": {1: math.nan}},
    {"logit_bias": {1: 1001.0}},
    {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    {"logprobs": 21},
    {"stop_token_ids": [97]},
    {"stop_token_ids": [1] * 129},
]


@pytest.mark.parametrize(
    "fields", SAMPLINGS, ids=[next(iter(fields)) + str(i) for i, fields in enumerate(SAMPLINGS)]
)
def test_sampling_outside_its_range_names_the_field(fields: dict[str, Any]) -> None:
    refusal = decode_sampling("sampling", pb.Sampling(**fields), LIMITS)
    assert message(refusal).startswith(f"sampling.{next(iter(fields))}")


def test_sampling_at_the_edges_of_its_ranges_is_fine() -> None:
    sampling = decode_sampling(
        "sampling",
        pb.Sampling(
            temperature=100,
            top_k=2**32 - 1,
            top_p=1,
            min_p=1,
            repetition_penalty=100,
            presence_penalty=-100,
            logit_bias={96: -1000.0, 0: 1000.0},
            seed=2**64 - 1,
            logprobs=0,
            stop_token_ids=[96],
            min_tokens=2**32 - 1,
        ),
        LIMITS,
    )
    assert isinstance(sampling, Sampling)
    assert (sampling.top_k, sampling.logit_bias, sampling.logprobs) == (0, ((0, 1000.0), (96, -1000.0)), 0)


def test_unset_sampling_is_greedy_with_a_seed_of_its_own() -> None:
    one, two = (decode_sampling("s", pb.Sampling(), LIMITS) for _ in range(2))
    assert isinstance(one, Sampling)
    assert isinstance(two, Sampling)
    assert one.seed != two.seed
    assert Sampling(seed=one.seed) == one


def test_the_digest_knows_type_and_content() -> None:
    header = pb.StepHeader(step_id=1)
    requests = [kind(header=header) for kind in (pb.TruncateKvRequest, pb.ForkCacheRequest, pb.Step, pb.Step)]
    requests += [pb.Step(header=pb.StepHeader(step_id=2)), pb.Step(header=header)]
    requests[-1].header.traceparent = "no part of it"
    digests = [digest(request, request.header) for request in requests]
    assert len(set(digests)) == 4
    assert digests[2] == digests[3] == digests[5]


def test_forward_is_checked_before_it_is_computed() -> None:
    info = replace(FakeBackend().info, hidden_size=8, can_mask_forward=True, attention_window=2)

    def refused(**fields: Any) -> str:
        with pytest.raises(RequestRefused) as caught:
            decode_forward(pb.ForwardRequest(**fields), LIMITS, info)
        return caught.value.refusal.message

    one, hidden = [pb.ForwardInput(tokens=[1])], [pb.FORWARD_OUTPUT_HIDDEN]
    assert "inputs" in refused(outputs=hidden)
    assert "max_rows" in refused(inputs=one * 5, outputs=hidden)
    assert "outputs" in refused(inputs=one)
    assert "outputs" in refused(inputs=one, outputs=[9])
    assert "inputs[1].tokens" in refused(inputs=[*one, pb.ForwardInput()], outputs=hidden)
    assert "ids below 97" in refused(inputs=[pb.ForwardInput(tokens=[97])], outputs=hidden)
    assert "max_step_tokens" in refused(inputs=[pb.ForwardInput(tokens=[1] * 40)] * 2, outputs=hidden)
    call = decode_forward(pb.ForwardRequest(inputs=one, outputs=hidden * 2), LIMITS, info)
    assert call.inputs[0].tolist() == [1]
    assert call.want == {"hidden"}

    three = [pb.ForwardInput(tokens=[1, 2, 3])]
    assert "first_token: 3" in refused(inputs=three, outputs=hidden, first_token=3)
    assert "token_count: 3" in refused(inputs=three, outputs=hidden, first_token=1, token_count=3)
    assert "inputs[1]" in refused(inputs=[*three, *one], outputs=hidden, token_count=2)
    small = replace(LIMITS, max_full_logits_bytes=8 * 4 * 2)
    with pytest.raises(RequestRefused) as caught:
        decode_forward(pb.ForwardRequest(inputs=three, outputs=hidden), small, info)
    assert "first_token and token_count" in caught.value.refusal.message
    request = pb.ForwardRequest(inputs=three, outputs=hidden, first_token=1)
    assert decode_forward(request, small, info).views[0].returned == slice(1, None)


def test_the_view_of_an_input_of_forward_is_checked() -> None:
    info = replace(FakeBackend().info, hidden_size=8, can_mask_forward=True, attention_window=2)

    def refused(**fields: Any) -> str:
        item = pb.ForwardInput(tokens=[1, 2, 3], **fields)
        request = pb.ForwardRequest(inputs=[item], outputs=[pb.FORWARD_OUTPUT_HIDDEN])
        with pytest.raises(RequestRefused) as caught:
            decode_forward(request, LIMITS, info)
        expected = Reason.INVALID if info.can_mask_forward else Reason.UNSUPPORTED
        assert caught.value.refusal.reason is expected
        return caught.value.refusal.message

    assert "inputs[0].position_ids: 2, " in refused(position_ids=[0, 1])
    assert "context_length" in refused(position_ids=[0, 1, LIMITS.context_length])
    assert "3 or 9 bytes, not 4" in refused(attention_mask=b"\1" * 4)
    assert "token 0 sees none" in refused(attention_mask=b"\0\1\1")
    assert "token 2 sees none" in refused(attention_mask=b"\1\0\0")  # within the window
    assert "token 1 sees none" in refused(attention_mask=b"\1\1\1\0\0\1\1\1\1")
    info = replace(info, can_mask_forward=False)
    assert "inputs[0].position_ids" in refused(position_ids=[0, 1, 2])
    assert "inputs[0].attention_mask" in refused(attention_mask=b"\1\1\1")


def test_the_fakes_vocabulary_is_the_limits() -> None:
    assert FakeBackend().info.vocab_size == LIMITS.vocab_size
