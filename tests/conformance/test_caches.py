"""GetCaches, owners, upper bounds, packed prompts: what a scheduler needs to know or to say."""

from __future__ import annotations

import struct

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import NONE, Executor, Row, Session, release, truncate
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import pages, refused
from tests.conformance.kit.judge import Judge

OK, INVALID, NOT_FOUND = (
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
)


def test_lengths_and_pending_tokens_can_be_asked_for(
    executor: Executor, session: Session, draw: Draw
) -> None:
    chunked = session.open(draw.tokens(9), limit=4)
    decoded = session.open(draw.tokens(3))
    last = decoded.decode(2)[-1]
    cut = session.open(draw.tokens(5))
    cut.truncate(2)
    caches = executor.caches(session.id)
    assert sorted(caches) == sorted([chunked.id, decoded.id, cut.id])
    half = caches[chunked.id]
    assert (half.kv_length, half.pending_count) == (chunked.n, 9 - chunked.n)
    assert list(half.pending_tokens) == chunked.pending
    assert half.prompt_length == 9
    ready = caches[decoded.id]
    assert (ready.kv_length, list(ready.pending_tokens)) == (decoded.n, [last])
    assert ready.pages >= pages(decoded.n, executor.page)
    assert (caches[cut.id].kv_length, caches[cut.id].pending_count) == (2, 0)


def test_unknown_caches_are_left_out_and_an_unknown_session_is_not_found(
    executor: Executor, session: Session, draw: Draw
) -> None:
    mine = session.open(draw.prompt())
    assert list(executor.caches(session.id, mine.id, mine.id + 7)) == [mine.id]
    session.step(ops=[release(mine.id)])
    assert not executor.caches(session.id)
    assert refused(executor.caches, session.id ^ 1) is NOT_FOUND


def test_too_many_ids_at_once_are_refused(executor: Executor, session: Session) -> None:
    ids = range(1, executor.limits.max_released_ids + 2)
    assert refused(executor.caches, session.id, *ids) is INVALID


def test_the_last_step_that_is_done_can_be_asked_for(executor: Executor, session: Session) -> None:
    for step_id in (1, 2):
        executor.step(session.plan(step_id=step_id))
        response = executor.call("GetCaches", pb.GetCachesRequest(session_id=session.id))
        assert response.last_step_id == step_id


def test_a_new_session_of_an_owner_replaces_the_former_one(executor: Executor, draw: Draw) -> None:
    first = executor.open_session(owner="scheduler-1")
    first.open(draw.prompt())
    other = executor.open_session(owner="scheduler-2")
    kept = other.open(draw.prompt())
    second = executor.open_session(owner="scheduler-1")
    assert refused(first.step) is grpc.StatusCode.FAILED_PRECONDITION
    assert kept.id in executor.caches(other.id), "another owner's session is left alone"
    nameless = executor.open_session()
    executor.open_session()
    assert not executor.caches(nameless.id), "sessions without an owner do not replace each other"
    second.close()
    other.close()


def test_a_row_may_give_an_upper_bound_of_its_length(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.tokens(4))
    wrong = [draw.tokens(1)[0] for _ in range(3)]
    bound = sequence.n + 1 + len(wrong)
    sequence.verify(wrong)
    row = Row(sequence.id, bound, is_bound=True)
    answer = session.step([row]).rows[0]
    assert answer.code is OK
    assert answer.kv_length == sequence.n + 1 <= bound
    sequence.took(row, answer)
    judge.check(sequence)


def test_an_upper_bound_that_is_too_low_is_refused(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.tokens(4))
    row = Row(sequence.id, sequence.n - 1, is_bound=True)
    reply = session.step([row]).rows[0]
    assert reply.code is grpc.StatusCode.FAILED_PRECONDITION
    assert (reply.reason, reply.known_length) == (pb.ERROR_REASON_KV_LENGTH, sequence.n)


def test_a_bound_does_not_go_with_tokens_of_its_own(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.tokens(4))
    row = Row(sequence.id, sequence.n, tokens=[1], is_bound=True)
    assert session.step([row]).rows[0].code is INVALID


def test_a_packed_prompt_is_the_same_prompt(session: Session, draw: Draw) -> None:
    prompt = draw.tokens(6)
    plain = session.open(prompt)
    packed = session.opening([], packed_tokens=struct.pack(f"<{len(prompt)}I", *prompt))
    reply = session.step(openings=[packed]).rows[0]
    assert (reply.code, reply.kv_length, reply.tokens) == (OK, len(prompt), plain.emitted)


@pytest.mark.parametrize("packed", [b"\1\0\0", b"\xff\xff\xff\xff"], ids=["torn", "no id"])
def test_a_bad_packed_prompt_is_refused(session: Session, packed: bytes) -> None:
    assert session.step(openings=[session.opening([], packed_tokens=packed)]).rows[0].code is INVALID


def test_tokens_and_packed_tokens_do_not_go_together(session: Session) -> None:
    both = session.opening([1], packed_tokens=b"\1\0\0\0")
    assert session.step(openings=[both]).rows[0].code is INVALID


def test_refused_rows_say_why_in_words_for_programs(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.tokens(4))
    other = session.open(draw.tokens(2))
    wrong_length = Row(sequence.id, sequence.n + 1)
    reply = session.step([wrong_length, Row(other.id + 9, 1)], ops=[truncate(other.id + 9, 0)])
    assert (reply.rows[0].reason, reply.rows[0].known_length) == (pb.ERROR_REASON_KV_LENGTH, sequence.n)
    assert reply.rows[1].reason == pb.ERROR_REASON_CACHE
    assert reply.ops[0].reason == pb.ERROR_REASON_CACHE


def test_rows_take_from_the_steps_tokens_in_order(executor: Executor, session: Session, draw: Draw) -> None:
    most = executor.limits.max_step_tokens
    if 2 * executor.page > most or most > executor.info.model.context_length:
        first, rest = 1, most
    else:
        first, rest = most - 1, 2
    if (
        first > executor.info.model.context_length
        or pages(first, executor.page) > executor.limits.total_pages
    ):
        return  # no step can be as large as that here
    openings = [session.opening(draw.tokens(size), output=NONE) for size in (first, rest, 1)]
    rows = session.step(openings=openings).rows
    assert rows[0].code is OK
    assert (rows[1].code, rows[1].reason) == (INVALID, pb.ERROR_REASON_TOO_LARGE)
    assert rows[2].code is OK, "what fits goes on"


def test_prefills_and_decodes_are_counted_apart(executor: Executor, session: Session, draw: Draw) -> None:
    before = executor.status()
    sequence = session.open(draw.tokens(5))
    sequence.decode(3)
    after = executor.status()
    assert after.prefill_steps - before.prefill_steps == 1
    assert after.prefill_rows - before.prefill_rows == 1
    assert after.decode_steps - before.decode_steps == 3
    assert after.decode_rows - before.decode_rows == 3
    assert after.prefill_s >= before.prefill_s
    assert after.decode_s >= before.decode_s
