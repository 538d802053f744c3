"""Bad input gets a precise error, before anything is allocated, and harms nobody else."""

from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import TOP_K, Executor, Row, Sequence, Session, pack
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import codes_of, refused
from tests.conformance.kit.judge import Judge

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN, INF = float("nan"), float("inf")
HUGE = 2**32 - 1

# The field that the message must name, and how to break it. V: the vocabulary, C: the context length.
SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", -INF),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("min_p", NAN),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 101.0),
    ("repetition_penalty", NAN),
    ("presence_penalty", 101.0),
    ("presence_penalty", NAN),
    ("frequency_penalty", -101.0),
    ("frequency_penalty", INF),
    ("logit_bias", {"V": 1.0}),
    ("logit_bias", {HUGE: 1.0}),
    ("logit_bias", {0: NAN}),
    ("logit_bias", {0: INF}),
    ("logit_bias", {0: 1000.5}),
    ("logit_bias", {0: -1001.0}),
    ("stop_token_ids", ["V"]),
    ("stop_token_ids", [0, HUGE]),
    ("logprobs", HUGE),
]
OPENING: list[tuple[str, Any]] = [
    ("cache_id", 0),
    ("tokens", []),
    ("tokens", ["V"]),
    ("tokens", [0, HUGE]),
    ("prompt_length", 4),  # of three tokens
    ("prompt_length", HUGE),
    ("output", 99),
]


def resolve(value: Any, executor: Executor) -> Any:
    """Put the executor's own numbers in."""
    if isinstance(value, list):
        return [resolve(item, executor) for item in value]
    if isinstance(value, dict):
        return {resolve(key, executor): resolve(item, executor) for key, item in value.items()}
    return executor.vocab if value == "V" else value


def check_refused(session: Session, draw: Draw, judge: Judge, bad: list[tuple[str, pb.Opening]]) -> None:
    """Each opening is refused by name; a row and an opening beside them do not notice; no page is lost."""
    for cases in batched(bad, session.executor.limits.max_rows - 2):
        neighbour = session.open(draw.prompt())
        row, other = neighbour.row(), session.opening(draw.prompt())
        before = session.executor.status()
        reply = session.step([row], [*(opening for _, opening in cases), other])
        for (field, opening), answer in zip(cases, reply.rows[1:-1], strict=True):
            assert answer.code is INVALID, f"{answer.code.name} {answer.message!r} of {opening}"
            assert field in answer.message, f"{answer.message!r} does not name {field} of {opening}"
        neighbour.took(row, reply.rows[0])
        good = Sequence(session, other).took_opening(reply.rows[-1])
        assert session.executor.status().sequences == before.sequences + 1
        for sequence in (neighbour, good):
            sequence.decode(1)
            judge.check(sequence)


def batched(cases: list[tuple[str, pb.Opening]], size: int) -> list[list[tuple[str, pb.Opening]]]:
    """Lists of at most `size` of them."""
    return [cases[start : start + size] for start in range(0, len(cases), size)]


def sampled(session: Session, draw: Draw, fields: Iterable[tuple[str, Any]]) -> list[tuple[str, pb.Opening]]:
    """An opening for each field of Sampling, which is what is bad."""
    samplings = ((name, pb.Sampling(**{name: resolve(value, session.executor)})) for name, value in fields)
    return [(name, session.opening(draw.tokens(3), sampling=sampling)) for name, sampling in samplings]


def test_sampling_out_of_range(session: Session, draw: Draw, judge: Judge) -> None:
    check_refused(session, draw, judge, sampled(session, draw, SAMPLING))


def test_openings_out_of_range(session: Session, draw: Draw, judge: Judge) -> None:
    bad = []
    for field, value in OPENING:
        fields = {"tokens": [1, 0, 1], field: resolve(value, session.executor)}
        bad.append((field, session.opening(fields.pop("tokens"), **fields)))
    check_refused(session, draw, judge, bad)


def test_a_prompt_longer_than_the_context(session: Session, draw: Draw, judge: Judge) -> None:
    opening = session.opening([0] * (session.executor.info.model.context_length + 1))
    check_refused(session, draw, judge, [("tokens", opening)])


def test_one_more_than_the_limit(session: Session, draw: Draw, judge: Judge) -> None:
    limits, vocab = session.executor.limits, session.executor.vocab
    fields: list[tuple[str, Any]] = [
        # Keys of a map are distinct, so a small vocabulary runs out of valid ones: both are refused.
        ("logit_bias", dict.fromkeys(range(limits.max_logit_bias + 1), 0.5)),
        ("stop_token_ids", [token % vocab for token in range(limits.max_stop_token_ids + 1)]),
        ("logprobs", limits.max_logprobs + 1),
    ]
    check_refused(session, draw, judge, sampled(session, draw, fields))


@pytest.mark.needs("TOP_K")
def test_a_top_k_beyond_the_limit(session: Session, draw: Draw, judge: Judge) -> None:
    cases = [
        ("top_k", session.opening(draw.tokens(3), output=TOP_K, top_k=top_k))
        for top_k in (session.executor.limits.max_logprobs + 1, HUGE)
    ]
    check_refused(session, draw, judge, cases)


ROWS: dict[str, dict[str, Any]] = {
    "tokens at V": {"tokens": ["V"]},
    "tokens at 2^32 - 1": {"tokens": [0, HUGE]},
    "unknown output mode": {"output": 99},
    "KV length of 2^32 - 1": {"kv_length": HUGE},
}


def test_rows_out_of_range(session: Session, draw: Draw, judge: Judge) -> None:
    neighbour, *victims = (session.open(draw.prompt()) for _ in range(1 + len(ROWS)))
    own = neighbour.row()
    rows = [
        victim.row(**resolve(ROWS[case], session.executor))
        for victim, case in zip(victims, ROWS, strict=True)
    ]
    reply = session.step([own, *rows], rpc="BatchDecode")
    neighbour.took(own, reply.rows[0])
    for case, answer in zip(ROWS, reply.rows[1:], strict=True):
        expected = grpc.StatusCode.FAILED_PRECONDITION if "KV length" in case else INVALID
        assert answer.code is expected, f"{case}: {answer.code.name} {answer.message}"
    for sequence in (neighbour, *victims):
        sequence.decode(1)
        judge.check(sequence)


SHAPES: dict[str, dict[str, list[int]]] = {
    "no KV lengths": {"kv_lengths": []},
    "a KV length too many": {"kv_lengths": [1, 2, 3]},
    "limits for one row of two": {"limits": [1]},
    "steps for three rows of two": {"steps": [1, 1, 1]},
    "outputs for one row of two": {"outputs": [1]},
    "top_ks for one row of two": {"top_ks": [1]},
    "tokens without counts": {"tokens": [1], "token_counts": []},
    "counts without tokens": {"token_counts": [1, 0]},
    "counts that say less": {"tokens": [1, 2], "token_counts": [1, 0]},
    "counts that say more": {"tokens": [1], "token_counts": [1, 1]},
    "counts that wrap": {"tokens": [1], "token_counts": [HUGE, 2]},
    "draft counts that say more": {"drafts": [1], "draft_counts": [2, 0]},
    "drafts without counts": {"drafts": [1], "draft_counts": []},
}


def test_a_broken_shape_refuses_the_step_and_changes_nothing(
    session: Session, draw: Draw, judge: Judge
) -> None:
    sequences = [session.open(draw.prompt()) for _ in range(2)]
    before = session.executor.status()
    for case, arrays in SHAPES.items():
        packed = pack(sequence.row() for sequence in sequences)
        for field, values in arrays.items():
            packed.ClearField(field)  # type: ignore[arg-type]
            getattr(packed, field).extend(values)
        step = pb.Step(header=session.header(), rows=packed, openings=[session.opening(draw.prompt())])
        assert refused(session.executor.step, step) is INVALID, case
        assert session.executor.status().sequences == before.sequences, case
    for sequence in sequences:
        sequence.decode(1)
        judge.check(sequence)


def test_arrays_without_rows_are_a_broken_shape(session: Session) -> None:
    step = pb.Step(header=session.header(), rows=pb.Rows(tokens=[1], token_counts=[1]))
    assert refused(session.executor.step, step) is INVALID


def test_each_rpc_takes_its_own_rows(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    row, opening = sequence.row(), session.opening(draw.prompt())
    step = session.plan
    cases = [
        ("Prefill", step()),
        ("Prefill", step([row], [opening])),
        ("Prefill", step(openings=[opening, session.opening(draw.short())])),
        ("BatchPrefill", step()),
        ("Decode", step()),
        ("Decode", step(openings=[opening])),
        ("Decode", step([row, session.open(draw.short()).row()])),
        ("BatchDecode", step()),
        ("BatchDecode", step(openings=[opening])),
        ("BatchDecode", step([sequence.row(drafts=[0])])),
        ("ForwardVerify", step()),
        ("ForwardVerify", step(openings=[opening])),
    ]
    before = session.executor.status().sequences
    for rpc, message in cases:
        assert refused(session.executor.step, message, rpc) is INVALID, f"{rpc} took {message}"
    assert session.executor.status().sequences == before
    sequence.decode(1)
    judge.check(sequence)


def test_more_rows_than_the_limit_refuse_the_step(session: Session) -> None:
    limit = session.executor.limits.max_rows
    rows = [Row(cache_id, 1) for cache_id in range(1, limit + 2)]
    assert refused(session.step, rows) is INVALID


def test_more_tokens_than_the_limit_are_refused(session: Session, draw: Draw) -> None:
    executor = session.executor
    limit, context = executor.limits.max_step_tokens, executor.info.model.context_length
    if limit > 200_000:
        pytest.skip(f"max_step_tokens of {limit} is too large to try")
    openings, total = [], 0
    while total <= limit:
        openings.append(session.opening(draw.tokens(min(context, limit + 1 - total))))
        total += len(openings[-1].tokens)
    if len(openings) > executor.limits.max_rows:
        pytest.skip("max_rows comes first")
    codes = codes_of(executor, session.plan(openings=openings), len(openings))
    # Where the pool is smaller than a step, pages may run out first.
    assert set(codes) & {INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_nothing_goes_beyond_the_context_length(session: Session, draw: Draw, judge: Judge) -> None:
    executor = session.executor
    context, limits = executor.info.model.context_length, executor.limits
    if context > limits.total_pages * limits.page_size or context > 32_768:
        pytest.skip(f"a context of {context} tokens can't be filled here")
    chunk = min(context, limits.max_step_tokens)
    sequence = session.open(draw.tokens(context - 2), limit=chunk)
    while not sequence.emitted:
        sequence.feed("Prefill", limit=chunk)
    sequence.feed()
    too_long: list[dict[str, Any]] = [{"tokens": draw.tokens(2)}]
    if executor.can("MULTI_STEP"):
        too_long.append({"steps": 2})
    if executor.can("VERIFY"):
        too_long.append({"drafts": draw.tokens(1)})
    for fields in too_long:
        assert session.step([sequence.row(**fields)]).rows[0].code is INVALID, fields
    sequence.feed()
    assert sequence.n == context
    assert refused(sequence.feed) is INVALID
    assert refused(sequence.feed, tokens=draw.tokens(1)) is INVALID


def test_a_prompt_of_ten_megabytes(session: Session, draw: Draw, judge: Judge) -> None:
    """Refused by the executor or, before it, by the transport's own limit."""
    neighbour = session.open(draw.prompt())
    opening = session.opening([session.executor.vocab - 1] * (5 << 20))
    code = refused(session.executor.step, session.plan(openings=[opening]), "Prefill")
    assert code in {INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED}
    neighbour.decode(1)
    judge.check(neighbour)


def test_an_op_of_no_kind_is_refused(session: Session) -> None:
    assert session.step(ops=[pb.Op()]).ops[0].code is INVALID


def test_a_sequence_survives_a_storm_of_bad_steps(session: Session, draw: Draw, judge: Judge) -> None:
    """A canary decodes while everything around it is refused."""
    canary = session.open(draw.prompt())
    for value in (HUGE, session.executor.vocab):
        for row in (Row(canary.id, HUGE), Row(canary.id, canary.n, tokens=[value]), Row(HUGE, 0), Row(0, 0)):
            own = canary.row()
            if row.cache_id != canary.id:
                reply = session.step([row, own])
                canary.took(own, reply.rows[1])
            else:
                reply = session.step([row])
                canary.decode(1)
            assert reply.rows[0].code is not grpc.StatusCode.OK
    judge.check(canary)
