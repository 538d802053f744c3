"""Where a call goes, and when its caller is told that it failed; time is the test's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import paceline
import pytest
from paceline import errors
from paceline.affinity import affinity_key
from paceline.failover import MAX_LOSSES, TRIED_BEFORE_GIVEN, Attempts, Rotation, addresses_of
from paceline.scheduler.v1 import scheduler_pb2 as pb

REFUSED = errors.Unavailable("failed to connect to all addresses")
BROKEN = errors.Unavailable("Socket closed")
FULL = errors.QueueFull("full", reason="QUEUE_FULL", retry_after_s=3.0)


def attempts(
    rotation: Rotation, *, timeout_s: float | None = None, failover_timeout_s: float = 30
) -> Attempts:
    return Attempts(rotation, 0.0, timeout_s=timeout_s, failover_timeout_s=failover_timeout_s)


def times_of_refusals(call: Attempts, now: float) -> Iterator[float]:
    """It is lost, and then refused again and again: when each attempt is made."""
    error = BROKEN
    while True:
        now += call.failed(error, now)
        yield now
        call.timeout_s(now)
        error = REFUSED


def test_addresses_are_one_or_several_and_each_once() -> None:
    assert addresses_of("a:1") == ("a:1",)
    assert addresses_of(" a:1, b:2,a:1,") == ("a:1", "b:2")
    assert addresses_of(["a:1", "b:2"]) == ("a:1", "b:2")
    nothing: tuple[str | list[str], ...] = ("", ",", [])
    for none in nothing:
        with pytest.raises(ValueError, match="no address"):
            addresses_of(none)


def test_calls_begin_at_each_address_in_turn() -> None:
    rotation = Rotation("abc")
    assert [attempts(rotation).address for _ in range(6)] == [*"abcabc"]


def test_calls_with_a_key_begin_at_its_scheduler_unless_that_has_too_many_of_them() -> None:
    """By AFFINITY's vector of this text; none gets more than 1.25 of the mean, rounded up."""
    addresses = ["10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"]
    rotation, key = Rotation(addresses), affinity_key(pb.GenerateRequest(text="hello"))
    one, two, three = addresses
    assert rotation.order(0.0, key) == [two, three, one]
    for _ in range(2):
        rotation.began(two)
    assert rotation.order(0.0, key) == [three, two, one]
    rotation.ended(two)
    rotation.down(two, 0.0)
    assert rotation.order(0.0, key) == [three, one, two]
    assert attempts(rotation).address == one  # without a key: in turn
    roomy = Rotation(addresses, extra_streams=3)
    for _ in range(5):
        roomy.began(two)
    assert roomy.order(0.0, key) == [two, three, one]  # it may have 6: 1.25 of the mean are 3, and 3 more
    roomy.began(two)
    assert roomy.order(0.0, key) == [three, two, one]


def test_an_address_that_is_down_comes_last_for_a_while_and_longer_each_time() -> None:
    rotation = Rotation("ab")
    rotation.down("a", 0.0)
    rotation.down("a", 0.5)  # another call has found out too
    assert {rotation.order(0.9)[0] for _ in range(4)} == {"b"}
    assert {rotation.order(1.0)[0] for _ in range(4)} == {"a", "b"}
    rotation.down("a", 1.0)
    assert {rotation.order(2.9)[0] for _ in range(4)} == {"b"}
    rotation.up("a")
    assert {rotation.order(2.9)[0] for _ in range(4)} == {"a", "b"}


@pytest.mark.parametrize("refusal", [REFUSED, FULL, errors.Unavailable("draining", reason="DRAINING")])
def test_a_refusal_is_the_callers_once_all_have_refused(refusal: errors.RetryLater) -> None:
    call = attempts(Rotation("abc"))
    tried = [call.address]
    for _ in range(2):
        assert call.failed(refusal, 0.0) == 0.0
        tried.append(call.address)
    assert sorted(tried) == [*"abc"]
    with pytest.raises(type(refusal)):
        call.failed(refusal, 0.0)


def test_the_refusal_that_is_told_is_the_one_that_ends_first() -> None:
    call = attempts(Rotation("abc"))
    call.failed(FULL, 0.0)
    call.failed(errors.QueueFull("full", retry_after_s=0.5), 0.0)
    with pytest.raises(errors.QueueFull) as caught:
        call.failed(REFUSED, 0.0)
    assert caught.value.retry_after_s == 0.5


FINAL = [
    errors.Cancelled("aborted"),
    errors.DeadlineExceeded("late"),
    errors.InternalError("a bug"),
    errors.incomplete("the stream ended"),
    errors.InvalidRequest("n: bad"),
    errors.StaleState("continuation.sampler: is another one here"),
    errors.Unauthenticated("no token"),
    errors.Unsupported("grammar"),
    errors.DuplicateRequest("request_id: is live"),
]


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("answered", [False, True])
def test_other_errors_are_tried_nowhere_else(error: errors.PacelineError, answered: bool) -> None:
    call = attempts(Rotation("ab"))
    if answered:
        call.answered()
    with pytest.raises(type(error)):
        call.failed(error, 0.0)


LOST = [(False, BROKEN), (True, BROKEN), (True, errors.Unavailable("down", reason="SHUTTING_DOWN"))]


@pytest.mark.parametrize(("answered", "error"), LOST)
def test_a_lost_call_goes_to_another_at_once(answered: bool, error: errors.Unavailable) -> None:
    call = attempts(Rotation("ab"))
    if answered:
        call.answered()
    assert call.failed(error, 0.0) == 0.0
    assert call.address == "b"


@pytest.mark.parametrize("answered", [False, True])
def test_a_lost_call_with_one_address_waits_for_it_and_not_for_ever(answered: bool) -> None:
    call = attempts(Rotation("a"), failover_timeout_s=10)
    if answered:
        call.answered()
    times: list[float] = []
    with pytest.raises(errors.Unavailable):
        times.extend(times_of_refusals(call, 0.0))
    assert times[-1] == pytest.approx(10)
    waits = [later - earlier for earlier, later in pairwise([0.0, *times])]
    assert all(0 < wait <= 1.0 for wait in waits)


def test_a_call_that_waits_for_its_scheduler_says_so_once_for_each_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "paceline")
    call = attempts(Rotation("ab"), failover_timeout_s=10)
    for now in (0.0, 100.0):
        call.answered()
        call.failed(BROKEN, now)  # the other one is tried at once
        for later in range(3):
            call.failed(REFUSED, now + later)
    said = "the connection was lost, trying again for 10 s (failed to connect to all addresses)"
    assert [one.message.partition(": ")[2] for one in caplog.records] == [said] * 2


@pytest.mark.parametrize("address", ["no.such.invalid:1", "127.0.0.1:1", "unix:/no/such/socket"])
def test_a_scheduler_that_was_never_reached_lost_no_call(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    with paceline.Client(address) as client, pytest.raises(errors.Unavailable):
        client.complete("x")
    assert not caplog.records  # it was not tried again


def test_a_stream_that_began_before_the_first_look_goes_on_by_its_model_alone() -> None:
    rotation = Rotation("a")
    call = attempts(rotation)
    call.answered(b"old")
    rotation.use("abc", {}, (), {}, {"a": b"old", "b": b"new", "c": b"old"}, {"b"})
    tried = []
    for now in range(8):
        call.failed(BROKEN if now == 0 else REFUSED, float(now))
        tried.append(call.address)
    assert set(tried) == {"a", "c"}


def test_a_lost_call_honours_the_soonest_hint_when_all_refuse() -> None:
    call = attempts(Rotation("ab"))
    call.answered()
    call.failed(BROKEN, 0.0)
    assert call.failed(FULL, 0.0) == 3.0


def test_the_attempt_before_may_still_be_live_where_a_lost_call_is_sent_again() -> None:
    call = attempts(Rotation("a"))
    call.failed(BROKEN, 0.0)
    assert call.failed(errors.DuplicateRequest("request_id: is live"), 0.1) > 0


def test_each_loss_after_something_was_received_has_its_own_time() -> None:
    call, now = attempts(Rotation("a"), failover_timeout_s=10), 0.0
    for _ in range(20):
        call.answered()
        now += 9 + call.failed(BROKEN, now)


def test_a_call_that_ends_one_scheduler_after_the_other_is_given_up() -> None:
    call = attempts(Rotation("a"))
    for _ in range(MAX_LOSSES - 1):
        call.failed(BROKEN, 0.0)
    with pytest.raises(errors.Unavailable):
        call.failed(BROKEN, 0.0)


def test_the_error_at_the_deadline_has_the_call_its_time_and_what_a_service_says_of_the_cause() -> None:
    call = Attempts(Rotation("a"), 0.0, timeout_s=2.5, failover_timeout_s=0, call="Score")
    with pytest.raises(errors.DeadlineExceeded, match=r"^Score did not end within its timeout_s of 2\.5 s$"):
        call.timeout_s(2.5)
    said = errors.DeadlineExceeded("it was queued", reason="DEADLINE")
    with pytest.raises(errors.DeadlineExceeded, match=r"of 2\.5 s: it was queued$") as caught:
        call.failed(said, 1.0)
    assert caught.value.reason == "DEADLINE"


def test_the_callers_deadline_bounds_all_attempts_together() -> None:
    call = attempts(Rotation("a"), timeout_s=2)
    assert call.timeout_s(0.5) == 1.5
    call.answered()
    times: list[float] = []
    with pytest.raises(errors.DeadlineExceeded):
        times.extend(times_of_refusals(call, 0.5))
    assert times[-1] == pytest.approx(2)


LOADING = errors.Unavailable("no executor yet", reason="NOT_READY", retry_after_s=1.0)


def test_a_call_that_all_refuse_waits_once_at_a_scheduler_whose_model_is_loading() -> None:
    call = Attempts(Rotation("ab"), 0.0, timeout_s=None, failover_timeout_s=30, load_wait_s=5.0)
    assert call.failed(LOADING, 0.0) == 0.0
    assert (call.address, call.metadata) == ("b", ())  # the other one may serve
    assert call.failed(FULL, 0.0) == 0.0
    assert (call.address, call.metadata) == ("a", (("paceline-wait-ms", "5000"),))
    with pytest.raises(errors.Unavailable, match="no executor yet"):
        call.failed(LOADING, 5.0)


def test_a_call_waits_for_no_model_if_its_client_does_not_want_to() -> None:
    call = Attempts(Rotation("a"), 0.0, timeout_s=None, failover_timeout_s=0)
    with pytest.raises(errors.Unavailable, match="no executor yet"):
        call.failed(LOADING, 0.0)


@pytest.mark.parametrize(
    "error", [errors.NotFound("x"), errors.Unauthenticated("x"), errors.Unsupported("x")]
)
def test_what_a_learned_scheduler_does_not_know_or_let_in_a_given_one_decides(
    error: errors.PacelineError,
) -> None:
    rotation = Rotation("a")
    rotation.use("cba", {}, ())
    call = attempts(rotation)
    assert call.address == "c"
    assert call.failed(error, 0.0) == 0
    assert call.address == "a"
    assert not rotation.is_down("c", 0.0)  # it may be the caller's fault
    with pytest.raises(type(error)):
        call.failed(error, 0.0)


def test_after_a_message_a_learned_schedulers_word_is_the_last() -> None:
    rotation = Rotation("a")
    rotation.use("ba", {}, ())
    call = attempts(rotation)
    call.answered()
    with pytest.raises(errors.NotFound):
        call.failed(errors.NotFound("x"), 0.0)


def test_an_address_that_the_directory_has_no_more_is_not_tried() -> None:
    rotation = Rotation("a")
    rotation.use("bcda", {}, ())
    call = attempts(rotation)
    rotation.use("da", {}, ())
    call.failed(errors.QueueFull("full", reason="QUEUE_FULL"), 0.0)
    assert call.address == "d"
    rotation.use("a", {}, ())
    call.skip(0.0)
    assert call.address == "a"
    call.skip(0.0)
    assert call.address == "a"


def test_many_learned_addresses_do_not_keep_a_call_from_a_given_one() -> None:
    rotation = Rotation("a")
    rotation.use([*map(str, range(1000)), "a"], {}, ())
    for key in (b"", b"x", b"y"):
        assert "a" in rotation.order(0.0, key)[: TRIED_BEFORE_GIVEN + 1]
