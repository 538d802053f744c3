"""What a FakeScheduler can be told, and that it is what schedulers do."""

from __future__ import annotations

import pytest
from paceline import ToolCall
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.testing import FakeError, FakeLoss, FakeReply, FakeStall
from paceline.testing.replies import CODES
from paceline.testing.rules import ReplyRules

from scheduler_service.rpc.statuses import CODES as SCHEDULERS


def test_every_reason_of_the_contract_can_be_told_and_has_the_code_that_schedulers_give_it() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name, _ in pb.ErrorReason.items()} - {"UNSPECIFIED"}
    assert set(CODES) == names
    assert {reason.name: code for reason, code in SCHEDULERS.items()}.items() <= CODES.items()


def test_where_waiting_helps_a_retry_time_is_told_until_something_was_sent() -> None:
    assert FakeError("QUEUE_FULL").retry_s == 1.0
    assert FakeError("QUEUE_FULL", retry_after_s=0.25).retry_s == 0.25
    assert FakeError("NOT_READY", after=1).retry_s is None
    assert FakeError("INTERNAL").retry_s is None


def test_a_text_is_sent_by_words_and_a_sequence_as_it_is() -> None:
    assert [delta.text for delta in FakeReply(" one two\n").deltas] == [" one", " two", "\n"]
    assert [delta.text for delta in FakeReply(["on", "e two"]).deltas] == ["on", "e two"]
    assert FakeReply("").deltas == []


def test_reasoning_comes_first_and_calls_come_last_and_tokens_are_bytes() -> None:
    reply = FakeReply("é", reasoning="Hm.", tool_calls=[ToolCall("1", "f", "{}")])
    thinks, says, calls = reply.deltas
    assert (thinks.reasoning, says.text, calls.tool_calls[0].name) == ("Hm.", "é", "f")
    assert [bytes(delta.token_ids).decode() for delta in reply.deltas] == ["Hm.", "é", "f{}"]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: FakeError("FULL"), "there is no reason 'FULL'; there are INVALID_REQUEST, "),
        (lambda: FakeError("INTERNAL", retry_after_s=-1), "retry_after_s -1 is negative"),
        (lambda: FakeError("INTERNAL", after=-1), "after -1 is negative"),
        (lambda: FakeLoss(times=0), "times 0 is less than 1"),
        (lambda: FakeReply("one two", fault=FakeStall(after=3)), "after 3 deltas, but there are 2"),
        (lambda: FakeReply("a", delay_s=-1), "a delay is negative"),
        (lambda: ReplyRules().add(FakeReply("a"), "(", None), "not a regular expression"),
        (lambda: ReplyRules().add(FakeReply("a"), None, 0), "times 0 is less than 1"),
    ],
)
def test_what_can_not_be_is_refused_when_it_is_told(make: object, complaint: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=r".") as caught:
        make()
    assert complaint in str(caught.value)


def test_the_first_reply_that_fits_and_is_not_used_up_is_taken() -> None:
    rules = ReplyRules()
    rules.add(FakeReply("once"), None, 1)
    rules.add(FakeReply("blue"), "sky", None)
    rules.add(FakeReply("else"), None, None)
    texts = [reply.text for prompt in ("sky", "the sky", "sea", "sky") if (reply := rules.take(prompt, "id"))]
    assert texts == ["once", "blue", "else", "blue"]
    rules.forget()
    assert rules.take("sky", "id") is None


def test_a_reply_that_is_never_given_is_refused() -> None:
    rules = ReplyRules()
    rules.add(FakeReply("always"), None, None)
    with pytest.raises(ValueError, match="never given"):
        rules.add(FakeReply("never"), "sky", 1)


def test_a_lost_request_keeps_its_reply_and_is_answered_after_its_losses() -> None:
    rules = ReplyRules()
    rules.add(FakeReply("lost twice", fault=FakeLoss(after=1, times=2)), None, 1)
    rules.add(FakeReply("other"), None, None)
    faults = [reply.fault for _ in range(3) if (reply := rules.take("", "a"))]
    assert faults == [FakeLoss(1, 2), FakeLoss(1, 2), None]
    reply = rules.take("", "a")
    assert reply is not None
    assert reply.text == "other"
