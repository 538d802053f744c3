"""WhyWaiting: a caller hears of its own requests, from their arrival on, and of nobody else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.credentials import Credentials
from service_kit.identity import Identity

from scheduler_service.core.wait_report import Phase, WaitReport
from scheduler_service.core.waiting.reasons import OWN, WaitReason
from scheduler_service.errors import ErrorReason
from scheduler_service.rpc import arriving
from scheduler_service.rpc.arrivals import AT_ONCE
from scheduler_service.rpc.arriving import ArrivingCall, ArrivingCalls
from scheduler_service.rpc.codec import explanation
from scheduler_service.rpc.servicer import SchedulerServicer
from scheduler_service.rpc.waiting_calls import WaitingCalls
from scheduler_service.streams.request import scoped_id
from tests.unit.scheduler.harness import make_request
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.test_early_refusals import CONTEXT, Tokenizer, scheduler

MINE, THEIRS = Identity("mine", "token"), Identity("theirs", "token")
ADMIN = Identity("boss", "token", admin=True)
CALLS = ("CALLERS_TURN", "TOKENIZING", "GRAMMAR_COMPILING")


def asked(waiting: WaitingCalls, caller: Identity, **request: Any) -> list[pb.RequestWait]:
    return list(waiting.answer(pb.WhyWaitingRequest(**request), caller).requests)


def queue() -> WaitingCalls:
    """`a`, `b` and then `secret` wait: the first two are of one identity, and `secret` is of another."""
    core = scheduler(Tokenizer(BaseException)).core  # type: ignore[arg-type]
    core.executor_lost(0.0)
    now = time.monotonic() - 50.0
    for name, who in (("a", MINE), ("b", MINE), ("secret", THEIRS)):
        labels = {"job": name}
        request = make_request(scoped_id(who.name, name), identity=who.name, arrival=now, labels=labels)
        core.add(request, now)
    core.expire(now)
    return WaitingCalls(core, ArrivingCalls())


def test_the_core_and_the_contract_have_the_same_reasons() -> None:
    theirs = {name.removeprefix("WAIT_REASON_"): number for name, number in pb.WaitReason.items()}
    assert {one.name: one.value for one in WaitReason if one} == {k: v for k, v in theirs.items() if v}


def test_a_caller_hears_where_its_request_is_and_what_would_end_its_wait() -> None:
    waiting = queue()
    [first] = asked(waiting, MINE, request_id="a")
    [behind] = asked(waiting, MINE, request_id="b")
    assert (first.phase, first.reason) == (pb.REQUEST_PHASE_QUEUED, pb.WAIT_REASON_NO_EXECUTOR)
    assert (behind.reason, behind.position) == (pb.WAIT_REASON_OWN_EARLIER, 2)
    assert behind.first_reason == pb.WAIT_REASON_NO_EXECUTOR
    assert "no executor is ready" in behind.explanation
    assert "number 2 in the queue" in behind.explanation
    assert (first.identity, dict(first.labels)) == ("", {"job": "a"})
    [so_far] = first.queue_waits
    assert so_far.us == pytest.approx(50e6, rel=0.1)
    assert first.phase_us == pytest.approx(so_far.us, rel=0.01)


def test_others_requests_are_unknown_and_asking_for_them_needs_an_administrator() -> None:
    waiting = queue()
    assert asked(waiting, MINE, request_id="secret") == []
    for of_others in ({"identity": "theirs"}, {"all_identities": True}):
        with raises(ErrorReason.PERMISSION):
            asked(waiting, MINE, request_id="secret", **of_others)
        [found] = asked(waiting, ADMIN, request_id="secret", **of_others)
        assert (found.request_id, found.identity) == ("secret", "theirs")
    assert [one.request_id for one in asked(waiting, MINE, slow=True)] == ["a", "b"]
    everybodys = asked(waiting, ADMIN, slow=True, all_identities=True)
    assert [one.request_id for one in everybodys] == ["a", "b", "secret"]


def test_a_part_of_an_id_finds_the_callers_own_requests_that_end_or_begin_so() -> None:
    core = scheduler(Tokenizer(BaseException)).core  # type: ignore[arg-type]
    arriving = ArrivingCalls()
    core.executor_lost(0.0)
    for name, who in (("abcd-12345678", MINE), ("efgh-12345678", MINE), ("12345678-ijkl", THEIRS)):
        core.add(make_request(scoped_id(who.name, name), identity=who.name), 0.0)
    waiting = WaitingCalls(core, arriving)

    def found(part: str, caller: Identity, **request: Any) -> list[str]:
        return [one.request_id for one in asked(waiting, caller, request_id=part, **request)]

    with arriving.entered(ArrivingCall(), "theirs", "mnop-12345678", {}):
        assert found("…-12345678", MINE) == ["abcd-12345678", "efgh-12345678"]
        assert found("…d-12345678", MINE) == found("abcd-123…", MINE) == ["abcd-12345678"]
        assert found("12345678…", THEIRS) == ["12345678-ijkl"]
        assert found("12345678…", MINE) == []
        assert found("…12345678", THEIRS) == ["mnop-12345678"]
        assert len(found("…12345678", ADMIN, all_identities=True)) == 3
        core.cancel(scoped_id("mine", "abcd-12345678"), time.monotonic())  # it is remembered
        assert sorted(found("…12345678", ADMIN, identity="mine")) == ["abcd-12345678", "efgh-12345678"]
        for wrong in ("…", "…1234567", "1234567…", "…12345678…", "…1234 5678"):
            with raises(ErrorReason.INVALID_REQUEST):
                found(wrong, MINE)


def test_an_answer_has_nothing_of_other_identities() -> None:
    waiting = queue()
    for one in asked(waiting, THEIRS, slow=True):
        told = str(one)
        assert "mine" not in told
        assert '"a"' not in told
        assert "boss" not in told


@pytest.mark.parametrize(
    "wrong",
    [
        *({}, {"slow": False}, {"request_id": ""}, {"request_id": "two words"}, {"request_id": "x" * 129}),
        {"slow": True, "identity": "mine", "all_identities": True},
    ],
)
def test_a_request_that_asks_for_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with raises(ErrorReason.INVALID_REQUEST):
        asked(queue(), ADMIN, **wrong)


def test_a_reply_has_at_most_256_requests_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.rpc.waiting_calls.MAX_REPORTS", 1)
    response = queue().answer(pb.WhyWaitingRequest(slow=True), MINE)
    assert ([one.request_id for one in response.requests], response.left_out) == (["a"], 1)


@pytest.mark.parametrize("reason", [one for one in WaitReason if one and one not in OWN])
def test_every_reason_is_explained_and_followed_to_what_would_help(reason: WaitReason) -> None:
    behind = WaitReason.OWN_EARLIER if reason.name not in CALLS else reason
    report = WaitReport(
        *("x a", "x", Phase.QUEUED, 0.0, 1.0),
        reason=behind,
        position=3,
        first_reason=reason,
        next_reason=WaitReason.SEATS,
    )
    told = explanation.explanation(report, 2.0)
    assert told.startswith("Queued for 2.0 s (predicted: 1.0 s), number 3 in the queue of its identity.")
    assert explanation._FOR[reason] in told
    if reason is WaitReason.OTHER_TURN:
        assert explanation._FOR[WaitReason.SEATS] in told
    else:
        assert explanation._HELP[reason] in told
    if behind is WaitReason.OWN_EARLIER:
        assert "Fewer requests of its identity at once help. " in told


def test_sums_of_one_that_waits_are_so_far_and_an_adapter_is_named_as_its_list_does() -> None:
    times = ((WaitReason.PAGES, 2.0), (WaitReason.TOKENIZING, 1e-4))
    report = WaitReport(
        *("x a", "x", Phase.QUEUED, 0.0, 1.0),
        queue_waits=times,
        position=1,
        adapter=bytes.fromhex("0123456789abcdef"),
    )
    told = explanation.explanation(report, 2.0)
    assert ", number 1 in the queue of its identity, with the adapter 0123456789ab." in told
    assert told.endswith("So far it has waited 2.0 s for pages.")
    told = explanation.explanation(replace(report, phase=Phase.RUNNING), 2.0)
    assert (
        told
        == "Runs, for 2.0 s, with the adapter 0123456789ab. Before its first step it waited 2.0 s for pages."
    )


@pytest.mark.parametrize(
    ("reason", "total", "told"),
    [
        (WaitReason.SEATS, 4, "all 4 places are taken."),
        (WaitReason.SEATS, 1, "the only place is taken."),
        (WaitReason.ADAPTER_SLOT, 2, "running sequences use all 2 slots for adapters."),
        (WaitReason.ADAPTER_SLOT, 0, "running sequences use all slots for adapters."),
        (WaitReason.PAGES, 40, "there are too few KV pages: it needs 13 pages, 4 of 40 are free."),
    ],
)
def test_how_many_there_are_in_all_is_told(reason: WaitReason, total: int, told: str) -> None:
    first = WaitReport(
        *("x a", "x", Phase.QUEUED, 0.0, 1.0),
        reason=reason,
        first_reason=reason,
        needed=13,
        available=4,
        total=total,
    )
    another = replace(
        first, reason=WaitReason.OTHER_TURN, first_reason=WaitReason.OTHER_TURN, next_reason=reason
    )
    assert f"It waits because {told}" in explanation.explanation(first, 2.0)
    shared = told.partition(":")[0].rstrip(".")
    assert f"What is next in turn waits because {shared}." in explanation.explanation(another, 2.0)


def test_an_ended_request_tells_its_own_pace() -> None:
    report = WaitReport("x a", "x", Phase.ENDED, 0.0, 0.0, tokens=100, token_s=1.02)
    assert explanation.explanation(report, 2.0) == "Ended 2.0 s ago. It got 100 tokens, one every 1.0 s."


@pytest.mark.parametrize(
    ("pace", "told"),
    [
        ((0.0, 0.5), ""),
        ((0.48, 0.3), "Steps take 480 ms each."),
        ((0.48, 0.97), "Steps take 480 ms each."),  # not a second yet
        ((0.02, 9), "Steps take 20 ms each; the last one was sent 9.0 s ago, and has no answer yet."),
        ((0.0, 9), "No step was answered yet; the last one was sent 9.0 s ago, and has no answer yet."),
    ],
)
def test_what_runs_is_told_how_long_steps_take(pace: tuple[float, float], told: str) -> None:
    step_s, step_age_s = pace
    report = WaitReport("x a", "x", Phase.RUNNING, 0.0, 0.0, step_s=step_s, step_age_s=step_age_s)
    assert explanation.explanation(report, 2.0) == f"Runs, for 2.0 s. {told}".strip()


class Held:
    """What a call waits for before it is queued: until `go`."""

    def __init__(self, answer: object) -> None:
        self.begun, self.go, self._answer = asyncio.Event(), asyncio.Event(), answer

    async def __call__(self, *_: object, **__: object) -> Any:
        self.begun.set()
        await self.go.wait()
        return self._answer


@pytest.mark.parametrize(
    ("reason", "request_of", "hold"),
    [
        (
            pb.WAIT_REASON_TOKENIZING,
            lambda: pb.GenerateRequest(text="hello", request_id="r"),
            lambda servicer, held: setattr(servicer._service.pool.served.text, "encode_text", held),
        ),
        (
            pb.WAIT_REASON_GRAMMAR_COMPILING,
            lambda: pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[1, 2]), request_id="r", grammar=pb.Grammar(regex="a+")
            ),
            lambda servicer, held: setattr(servicer._service.grammars, "check", held),
        ),
    ],
)
async def test_a_call_that_is_not_queued_yet_is_found_and_what_it_waited_for_is_in_its_sums(
    reason: int,
    request_of: Callable[[], pb.GenerateRequest],
    hold: Callable[[SchedulerServicer, Held], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(arriving, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    service = scheduler(Tokenizer(BaseException))  # type: ignore[arg-type]
    served = service.pool.served
    assert served is not None
    service.pool.served = replace(served, model=replace(served.model, max_grammar_bytes=9))
    servicer = SchedulerServicer(service, Credentials())
    held = Held([1, 2] if reason == pb.WAIT_REASON_TOKENIZING else ())
    hold(servicer, held)
    await servicer.admit(CONTEXT)  # notes when the call came
    now[0] += 3.0  # in which it had its turn
    caller = Credentials().identify(CONTEXT)
    opening = asyncio.create_task(servicer.open_stream(request_of(), caller, CONTEXT))
    begun = asyncio.create_task(held.begun.wait())
    await asyncio.wait([opening, begun], return_when=asyncio.FIRST_COMPLETED)
    assert not opening.done(), await opening
    now[0] += 5.0
    for question in ({"request_id": "r"}, {"slow": True}):
        [found] = asked(servicer._waiting, caller, **question)
        assert (found.phase, found.reason) == (pb.REQUEST_PHASE_ARRIVING, reason)
        times = {time.reason: time.us for time in found.queue_waits}
        assert times == {pb.WAIT_REASON_CALLERS_TURN: 3_000_000, reason: 5_000_000}
    crowd = [asyncio.create_task(servicer.admit(CONTEXT)) for _ in range(AT_ONCE + 2)]
    await asyncio.sleep(0)
    told = {reason: 1, pb.WAIT_REASON_CALLERS_TURN: len(servicer._arrivals)}
    assert told[pb.WAIT_REASON_CALLERS_TURN] >= 2  # beyond AT_ONCE
    assert (await servicer.GetStatus(pb.GetStatusRequest(), CONTEXT)).arriving == sum(told.values())
    service.metrics.show(service.core.snapshot(), (), service.core.waiting_by_reason())
    for number, count in told.items():
        labels = {"reason": WaitReason(number).name.lower()}
        shown = service.metrics.registry.get_sample_value("paceline_scheduler_waiting_by_reason", labels)
        assert shown == count
    await asyncio.gather(*crowd)
    held.go.set()
    stream = await opening
    assert (await servicer.GetStatus(pb.GetStatusRequest(), CONTEXT)).arriving == 0
    live = service.core._registry.get(stream.core_id)
    assert live is not None
    sums = dict(live.sequences[0].wait.queued.times())
    assert sums[WaitReason.CALLERS_TURN] == pytest.approx(3.0)
    assert sums[WaitReason(reason)] >= 5.0
    assert servicer._arriving.why("r", caller.name) is None
