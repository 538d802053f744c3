"""OpenSession, CloseSession: isolation, fencing, leases, the shared session and the epoch."""

import time

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.brief import BriefSession, unless_it_stands_still
from tests.conformance.kit.client import Executor, Session, release, truncate
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import refused
from tests.conformance.kit.judge import Judge

NOT_FOUND = grpc.StatusCode.NOT_FOUND
FENCED = grpc.StatusCode.FAILED_PRECONDITION


def test_sessions_do_not_see_each_others_caches(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    other = executor.open_session()
    mine, theirs = session.open(draw.prompt()), other.open(draw.prompt())
    assert mine.id == theirs.id, "the same id, chosen by two clients"
    mine.decode(2)
    theirs.decode(3)
    judge.check(mine)
    judge.check(theirs)
    extra = other.open(draw.prompt())
    reply = session.step([extra.row()], ops=[truncate(extra.id, 0), release(extra.id)])
    assert reply.rows[0].code is NOT_FOUND
    assert reply.ops[0].code is NOT_FOUND
    assert reply.ops[1].released == 0
    extra.decode(1)
    judge.check(extra)
    assert other.close() == 2
    mine.decode(1)
    judge.check(mine)


def test_session_ids_are_unique_and_not_zero(executor: Executor) -> None:
    sessions = [executor.open_session() for _ in range(3)]
    ids = {session.id for session in sessions}
    assert len(ids) == 3
    assert 0 not in ids
    for session in sessions:
        assert session.opened.max_in_flight == executor.limits.max_in_flight
        assert session.opened.lease_ms > 0
        session.close()


def test_closing_releases_everything_and_ends_the_session(executor: Executor, draw: Draw) -> None:
    session = executor.open_session()
    session.open(draw.prompt())
    session.open(draw.prompt(), limit=1)
    assert session.close() == 2
    assert executor.status().cache.owned_pages == 0
    assert refused(session.step) is NOT_FOUND
    assert session.close() == 0, "closing is idempotent"


def test_the_shared_session_can_not_be_closed(executor: Executor) -> None:
    request = pb.CloseSessionRequest(session_id=0)
    assert refused(executor.call, "CloseSession", request) is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_session_is_not_found(executor: Executor, session: Session, draw: Draw) -> None:
    stranger = Session(executor, pb.OpenSessionResponse(session_id=session.id ^ 1 or 2))
    assert refused(stranger.step, openings=[stranger.opening(draw.prompt())]) is NOT_FOUND
    status = pb.GetStatusRequest(session_id=stranger.id)
    assert refused(executor.call, "GetStatus", status) is NOT_FOUND


def test_replacing_releases_and_fences_the_old_session(executor: Executor, draw: Draw, judge: Judge) -> None:
    old = executor.open_session()
    sequence = old.open(draw.prompt())
    new = executor.open_session(replaces=old.id)
    assert executor.status().cache.owned_pages == 0
    assert refused(sequence.feed) is FENCED
    assert refused(old.step, openings=[old.opening(draw.prompt())]) is FENCED
    again = new.open([*sequence.cached, *sequence.pending])
    again.decode(1)
    judge.check(again)
    new.close()


def test_replacing_an_unknown_session_is_fine(executor: Executor) -> None:
    executor.open_session(replaces=2**64 - 1).close()


@unless_it_stands_still
def test_the_lease_ends_a_session_that_nobody_uses(executor: Executor, draw: Draw) -> None:
    idle = BriefSession(executor)
    with idle.in_time():
        idle.session.open(draw.prompt())
    deadline = time.monotonic() + 2 * idle.lease_s + 60
    while executor.status().sequences:
        assert time.monotonic() < deadline, "the idle session outlived its lease"
        time.sleep(idle.lease_s / 8)
    assert refused(idle.session.step) is NOT_FOUND


@unless_it_stands_still
def test_a_heartbeat_renews_the_lease(executor: Executor, draw: Draw) -> None:
    kept = BriefSession(executor)
    with kept.in_time():
        sequence = kept.session.open(draw.prompt())
    heartbeat = pb.GetStatusRequest(session_id=kept.session.id)
    over = time.monotonic() + 1.5 * kept.lease_s
    while time.monotonic() < over:
        time.sleep(kept.lease_s / 8)
        with kept.in_time():
            executor.call("GetStatus", heartbeat)
    with kept.in_time():
        sequence.decode(1)
    kept.session.close()


def test_whoever_names_no_session_shares_one(executor: Executor, draw: Draw, judge: Judge) -> None:
    shared = Session(executor, pb.OpenSessionResponse(session_id=0))
    cache_id = executor.open_session().id  # a number that nobody else has chosen
    Session(executor, pb.OpenSessionResponse(session_id=cache_id)).close()
    sequence = shared.open(draw.prompt(), cache_id=cache_id)
    sequence.decode(2)
    judge.check(sequence)
    assert shared.release(sequence) == 1


@pytest.mark.parametrize("stale", [1, 2**64 - 1])
def test_another_epoch_is_refused_as_a_whole(
    executor: Executor, session: Session, draw: Draw, judge: Judge, stale: int
) -> None:
    sequence = session.open(draw.prompt())
    epoch = executor.info.epoch ^ stale
    step = session.plan(
        [sequence.row()], [session.opening(draw.prompt())], [truncate(sequence.id, 0)], epoch=epoch
    )
    assert refused(executor.step, step) is grpc.StatusCode.FAILED_PRECONDITION
    assert (
        refused(executor.call, "GetStatus", pb.GetStatusRequest(epoch=epoch))
        is grpc.StatusCode.FAILED_PRECONDITION
    )
    right = session.plan([sequence.row()], epoch=executor.info.epoch)
    sequence.took(sequence.row(), executor.step(right).rows[0])
    judge.check(sequence)


def test_a_cache_id_is_never_used_again(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.prompt())
    twice = session.opening(draw.prompt(), cache_id=sequence.id)
    assert session.step(openings=[twice]).rows[0].code is grpc.StatusCode.ALREADY_EXISTS
    sequence.decode(1)
    session.release(sequence)
    assert session.step(openings=[twice]).rows[0].code is grpc.StatusCode.ALREADY_EXISTS
    assert refused(sequence.feed) is NOT_FOUND


def test_a_refused_opening_does_not_use_its_id_up(session: Session, draw: Draw, judge: Judge) -> None:
    cache_id = session.new_id()
    bad = session.opening([], cache_id=cache_id)
    assert session.step(openings=[bad]).rows[0].code is grpc.StatusCode.INVALID_ARGUMENT
    judge.check(session.open(draw.prompt(), cache_id=cache_id))


def test_a_label_has_its_limit(executor: Executor) -> None:
    request = pb.OpenSessionRequest(label="x" * 129)
    assert refused(executor.call, "OpenSession", request) is grpc.StatusCode.INVALID_ARGUMENT
