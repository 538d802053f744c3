"""Request ids, resends, aborts and cancellations: each ends the requests that it should, and no others."""

from __future__ import annotations

import asyncio

from service_kit.identity import Identity

from scheduler_service.core.config import CoreConfig
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.rpc.codec.output import output_message
from tests.support.work import bytecodes
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.stream_harness import (
    CALLER,
    StreamHarness,
    checked,
    read,
    take,
)


async def test_a_reused_id_gets_no_output_of_the_earlier_request() -> None:
    harness = StreamHarness()
    harness.admit()
    harness.step([11], deliver=False)
    harness.streams.abort("r", "ours", "aborted")
    second = harness.admit()
    harness.streams.deliver()
    assert not second._changed
    with raises(ErrorReason.DUPLICATE_REQUEST):
        harness.admit(n=2)


async def test_a_resend_of_the_same_bytes_replaces_a_request_that_was_sent_nothing() -> None:
    harness = StreamHarness()
    first = harness.admit(max_tokens=2)
    harness.step([11])
    second = harness.admit(max_tokens=2)
    with raises(ErrorReason.REPLACED):
        await read(first)
    harness.step([12])
    harness.step([13])
    assert [list(message.delta.token_ids) for message in await read(second)] == [[12, 13], []]
    assert len(harness.streams) == 0


async def test_a_resend_that_is_refused_leaves_the_request_before_it_alone() -> None:
    harness = StreamHarness(CoreConfig(max_queued_requests=1))
    first = harness.admit(max_tokens=2)
    harness.step([11])
    harness.admit("other")
    with raises(ErrorReason.QUEUE_FULL):
        harness.admit(max_tokens=2)
    harness.step([12])
    assert [list(message.delta.token_ids) for message in await read(first)] == [[11, 12], []]


async def test_a_resend_has_the_room_of_the_request_that_it_replaces() -> None:
    harness = StreamHarness(CoreConfig(max_queued_requests=1))
    first = harness.admit()
    harness.streams.check(CALLER, checked("r"), 2, None)
    second = harness.admit()
    with raises(ErrorReason.REPLACED):
        await read(first)
    with raises(ErrorReason.QUEUE_FULL):
        harness.streams.check(CALLER, checked("another"), 2, None)
    harness.step([11])
    assert [list(message.delta.token_ids) for message in await take(second)] == [[11]]


async def test_a_resend_does_not_replace_a_request_that_was_sent_something() -> None:
    harness = StreamHarness()
    first = harness.admit(max_tokens=2)
    harness.step([11])
    await take(first)
    with raises(ErrorReason.DUPLICATE_REQUEST):
        harness.admit(max_tokens=2)


async def test_an_id_is_in_use_until_its_end_is_delivered() -> None:
    harness = StreamHarness()
    harness.admit(max_tokens=1)
    harness.step(deliver=False)
    assert not harness.core.live("ours r")
    with raises(ErrorReason.DUPLICATE_REQUEST):
        harness.admit()


async def test_closing_a_stream_ends_its_request_and_no_other() -> None:
    harness = StreamHarness()
    stream, other = harness.admit("a"), harness.admit("b")
    harness.step()
    harness.streams.close(stream)
    harness.streams.close(stream)
    assert not harness.core.live("ours a")
    assert harness.core.live("ours b")
    assert not other.ended


async def test_a_reader_that_stalls_is_ended_with_the_reason() -> None:
    harness = StreamHarness()
    stream, waiting = harness.admit("stalled"), harness.admit("waiting")
    harness.step()
    await take(stream)  # and never again
    await take(waiting)
    taking = asyncio.create_task(waiting.take())  # waits for more: this one is no slow reader
    await asyncio.sleep(0)
    harness.now = stream._taken_at + 31.0  # type: ignore[operator]
    harness.streams.cancel_stalled(30.0)
    with raises(ErrorReason.STALLED_READER):
        await take(stream)
    assert harness.core.live("ours waiting")
    taking.cancel()


async def test_two_callers_may_use_one_id_and_each_aborts_only_its_own() -> None:
    harness, other = StreamHarness(), Identity("theirs", "token")
    mine, theirs = harness.admit("r"), harness.admit("r", caller=other)
    assert not harness.streams.abort("unknown", "theirs", "")
    assert not harness.streams.abort("r", "third", "")
    assert harness.streams.abort("r", "theirs", "")
    assert theirs.ended
    assert not mine.ended
    harness.step([11])
    messages = [output_message(one) for one in await mine.take()]
    assert messages[0].started.request_id == "r"  # as the client named it
    assert [list(message.delta.token_ids) for message in messages[1:]] == [[11]]


async def test_an_administrator_aborts_the_requests_of_all_identities() -> None:
    harness = StreamHarness()
    streams = [harness.admit("r"), harness.admit("r", caller=Identity("theirs", "token"))]
    other = harness.admit("s")
    assert harness.streams.abort_all("r", "")
    assert all(stream.ended for stream in streams)
    assert not other.ended
    assert not harness.streams.abort_all("r", "")


def work_to_end_all(requests: int) -> int:
    """Bytecodes of ending so many requests at once, each of which has a token that was not delivered yet."""
    harness = StreamHarness()
    for number in range(requests):
        harness.admit(f"r{number}")
    harness.step(deliver=False)
    work = bytecodes(
        lambda: harness.streams.cancel_all(
            ServiceError(ErrorReason.ABORTED, "all"), ServiceError(ErrorReason.ABORTED, "all")
        )
    )
    assert not len(harness.streams)
    return work


async def test_ending_all_requests_costs_each_of_them_the_same_however_many_there_are() -> None:
    assert work_to_end_all(96) < 1.2 * 8 * work_to_end_all(12)
