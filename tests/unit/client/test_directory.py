"""Which schedulers of a directory a client uses, and which of them get its token."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from paceline.channel import Security
from paceline.directory import (
    LOOK_AGAIN_S,
    LOOK_EVERY_S,
    MAX_LEARNED,
    NO_DIRECTORY_S,
    VIEW_ROUNDS,
    DirectoryUse,
    KnownSchedulers,
)
from paceline.errors import Unavailable
from paceline.failover import MAX_TRIED, Attempts, Rotation
from paceline.scheduler.v1 import scheduler_pb2 as pb

NEAR, FAR = "127.0.0.1:1", "10.0.0.1:50051"
PLAIN, TLS = Security(token="secret"), Security(ca_file=Path("ca.pem"), token="secret")
NO_HOST_AND_PORT = [
    *("unix:/b.sock", "unix-abstract:b", "dns:///attacker:1", "ipv4:127.0.0.1:1,10.0.0.2:1", "::1:5005"),
    *("attacker:1/", "localhost", "", "127.0.0.1:1\n"),
]


def entry(address: str, *, own: bool = False, **fields: object) -> pb.SchedulerEntry:
    values: dict[str, object] = {
        "model": "m",
        "model_fingerprint": b"print",
        "instance": f"drawn by {address}",
        "written_by": "" if own else "somebody",
        "state": pb.SCHEDULER_STATE_SERVING,
    }
    return pb.SchedulerEntry(address=address, **(values | fields))  # type: ignore[arg-type]


def known(
    given: str, *entries: pb.SchedulerEntry, security: Security = PLAIN, use: DirectoryUse = "safe"
) -> KnownSchedulers:
    schedulers = KnownSchedulers([given], security, use)
    schedulers.saw(given, [entry(given, own=True), *entries], 0.0)
    return schedulers


@pytest.mark.parametrize(
    ("given", "address", "tls_name", "security", "use", "used"),
    [
        (NEAR, "127.0.0.1:2", "", PLAIN, "safe", True),
        (NEAR, "10.0.0.2:1", "", PLAIN, "safe", False),  # the token would be readable on the way
        (NEAR, "10.0.0.2:1", "", PLAIN, "any", True),
        (FAR, "127.0.0.1:2", "", PLAIN, "safe", False),  # whatever listens here is not of that fleet
        (FAR, "127.0.0.1:2", "", PLAIN, "any", False),
        (FAR, "10.0.0.2:1", "name", TLS, "safe", True),
        (FAR, "10.0.0.2:1", "", TLS, "safe", False),
        (FAR, "10.0.0.2:1", "", TLS, "any", False),  # never without TLS where there is an authority
        (NEAR, "127.0.0.1:2", "", TLS, "any", False),
        (FAR, "10.0.0.2:1", "name", PLAIN, "any", False),  # nobody could check its certificate
        ("unix:/a.sock", "127.0.0.1:2", "", PLAIN, "safe", True),
        ("unix:/a.sock", "10.0.0.2:1", "", TLS, "any", False),
        *((NEAR, target, "", PLAIN, "any", False) for target in NO_HOST_AND_PORT),
    ],
)
def test_a_token_goes_to_a_learned_address_only_where_it_is_as_safe_as_at_the_given_one(
    given: str, address: str, tls_name: str, security: Security, use: DirectoryUse, *, used: bool
) -> None:
    schedulers = known(given, entry(address, tls_name=tls_name), security=security, use=use)
    assert (address in schedulers.addresses) is used
    if used:
        found = schedulers.security(address)
        assert found is not None
        assert (found.server_name, found.ca_file) == (tls_name, security.ca_file)
    else:
        assert schedulers.security(address) is None


def test_only_schedulers_of_the_same_model_are_used_and_each_once() -> None:
    schedulers = known(
        NEAR,
        entry("127.0.0.1:2"),
        entry("127.0.0.1:3", instance="drawn by 127.0.0.1:2"),
        entry("localhost:1", instance=f"drawn by {NEAR}"),  # the given one, by another name
        entry("127.0.0.1:4", model="other"),
    )
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2"]
    assert schedulers.is_what_it_says("127.0.0.1:2", b"print")
    assert not schedulers.is_what_it_says("127.0.0.1:2", b"other")
    assert schedulers.is_what_it_says(NEAR, b"whatever")
    schedulers.distrust("127.0.0.1:2")
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:3"]
    schedulers.distrust(NEAR)
    assert NEAR in schedulers.addresses


def test_another_fingerprint_gets_new_calls_once_the_present_one_takes_none_and_no_stream_that_began() -> (
    None
):
    def attempts() -> Attempts:
        return Attempts(rotation, 0.0, timeout_s=None, failover_timeout_s=9.0, key=b"k")

    def refused(call: Attempts) -> str:
        assert call.failed(Unavailable("draining", reason="DRAINING", retry_after_s=1.0), 0.0) == 0.0
        return call.address

    old, new = "127.0.0.1:2", "127.0.0.1:3"
    schedulers = known(NEAR, entry(old), entry(new, model_fingerprint=b"new"))
    assert schedulers.foreign == {new}
    rotation = Rotation([NEAR])
    rotation.use(schedulers.addresses, {}, schedulers.draining, {}, schedulers.models, schedulers.foreign)
    assert {rotation.order(0.0, b"%d" % number)[0] for number in range(20)} == {NEAR, old}
    stream, call = attempts(), attempts()
    stream.answered()
    assert {call.address, refused(call)} == {NEAR, old}
    assert refused(call) == new
    assert attempts().address == new  # at once, as long as the others take none
    tried = []
    for _ in range(3):
        stream.failed(Unavailable("connection reset"), 0.0)
        tried.append(stream.address)
    assert set(tried) == {NEAR, old}
    schedulers.lost(NEAR, 1.0)
    schedulers.lost(old, 1.0)
    assert schedulers.teller(1.0, lambda *_: False) == new
    schedulers.saw(new, [entry(new, own=True, model_fingerprint=b"new")], 1.0)
    assert new not in schedulers.foreign


def test_what_one_scheduler_does_not_know_another_may_and_a_lost_one_takes_its_word_along() -> None:
    schedulers = known(NEAR, entry("127.0.0.1:2"))
    schedulers.saw("127.0.0.1:2", [entry("127.0.0.1:2", own=True), entry("127.0.0.1:3")], 0.0)
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2", "127.0.0.1:3"]
    schedulers.saw(NEAR, [entry(NEAR, own=True)], 0.0)
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2", "127.0.0.1:3"]  # it speaks for itself
    schedulers.lost("127.0.0.1:2", 0.0)
    assert list(schedulers.addresses) == [NEAR]
    alone = known(NEAR, entry("127.0.0.1:2"))
    alone.lost(NEAR, 0.0)
    assert alone.addresses == (NEAR, "127.0.0.1:2")


def test_a_scheduler_that_is_loading_takes_back_nothing_that_it_told() -> None:
    schedulers = known(NEAR, entry("127.0.0.1:2"))
    schedulers.saw(NEAR, [entry(NEAR, own=True, model="", model_fingerprint=b"")], 10.0)
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2"]


def test_a_learned_scheduler_of_another_model_tells_nothing_and_is_used_no_more() -> None:
    schedulers = known(NEAR, entry("127.0.0.1:2"))
    other: dict[str, Any] = {"model": "other", "model_fingerprint": b"other"}
    theirs = [entry("127.0.0.1:2", own=True, **other), entry("127.0.0.1:3", **other)]
    schedulers.saw("127.0.0.1:2", theirs, 10.0)
    assert list(schedulers.addresses) == [NEAR]


def test_an_address_that_is_known_no_more_gets_nothing() -> None:
    schedulers = known(NEAR, entry("127.0.0.1:2"))
    schedulers.saw(NEAR, [entry(NEAR, own=True)], 10.0)
    assert schedulers.security("127.0.0.1:2") is None
    assert not schedulers.is_what_it_says("127.0.0.1:2", b"print")
    assert not schedulers.is_checked("127.0.0.1:2")
    assert schedulers.is_checked(NEAR)


def test_a_liar_is_a_start_of_a_scheduler_so_that_its_address_can_be_honest_again() -> None:
    schedulers = known(NEAR, entry("127.0.0.1:2"), entry("127.0.0.1:3"))
    # Its entry has the other's instance, which stays out of that.
    schedulers.saw(NEAR, [entry(NEAR, own=True), entry("127.0.0.1:2", instance="3"),
                          entry("127.0.0.1:3", instance="3")], 1.0)  # fmt: skip
    schedulers.distrust("127.0.0.1:2")
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:3"]
    schedulers.saw(NEAR, [entry(NEAR, own=True), entry("127.0.0.1:2")], 2.0)
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2"]
    assert schedulers.is_what_it_says("127.0.0.1:2", b"print")
    assert schedulers.is_checked("127.0.0.1:2")
    schedulers.saw(NEAR, [entry(NEAR, own=True), entry("127.0.0.1:2", instance="new")], 3.0)
    assert not schedulers.is_checked("127.0.0.1:2")


def test_what_was_told_long_ago_goes_once_somebody_tells_more() -> None:
    schedulers = known(NEAR, entry("127.0.0.1:2"))
    schedulers.saw("127.0.0.1:2", [entry("127.0.0.1:2", own=True), entry("127.0.0.1:3")], 1.0)
    age = VIEW_ROUNDS * LOOK_EVERY_S
    schedulers.saw(NEAR, [entry(NEAR, own=True), entry("127.0.0.1:2")], age)
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2", "127.0.0.1:3"]
    schedulers.saw(NEAR, [entry(NEAR, own=True), entry("127.0.0.1:2")], age + 2.0)
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2"]
    schedulers.lost(NEAR, 10 * age)
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2"]


def test_given_ones_that_are_up_are_asked_in_turn_then_learned_ones() -> None:
    def asked(*down: str) -> set[str]:
        return {schedulers.teller(0.0, lambda address, now: address in down) for _ in range(6)}

    other, learned = "127.0.0.1:9", "127.0.0.1:2"
    schedulers = KnownSchedulers([NEAR, other], PLAIN, "safe")
    schedulers.saw(NEAR, [entry(NEAR, own=True), entry(learned)], 0.0)
    assert asked() == {NEAR, other}
    assert asked(NEAR) == {other}
    assert asked(NEAR, other) == {learned}
    assert asked(NEAR, other, learned) == {NEAR, other}
    schedulers.has_none(NEAR, 0.0)
    assert asked() == {other}


def test_a_lost_given_scheduler_keeps_nobody_from_hearing_of_new_ones() -> None:
    def asked(now: float) -> str:
        assert schedulers.is_time_to_look(now)
        return schedulers.teller(now, lambda *_: False)  # nobody is down for as long as looks are apart

    learned, new = "127.0.0.1:2", "127.0.0.1:3"
    schedulers = known(NEAR, entry(learned))
    assert asked(100.0) == NEAR
    schedulers.lost(NEAR, 100.0)
    assert asked(100.0 + LOOK_AGAIN_S) == learned
    schedulers.saw(learned, [entry(learned, own=True), entry(new)], 101.0)
    assert asked(120.0) == NEAR  # it may be there again
    schedulers.lost(NEAR, 120.0)
    assert schedulers.addresses == (NEAR, learned, new)  # though nobody but itself tells of the second one
    schedulers.lost(learned, 120.0)
    schedulers.lost(new, 120.0)
    assert not schedulers.is_time_to_look(120.0 + LOOK_AGAIN_S)  # all are lost: there is no hurry


def test_a_caller_that_may_not_look_takes_nothing_from_others() -> None:
    schedulers = known(NEAR, entry("127.0.0.1:2"))
    bad, good = Security(token="bad").metadata, PLAIN.metadata
    assert schedulers.is_time_to_look(100.0, bad)
    schedulers.refused(bad, 100.0)
    assert list(schedulers.addresses) == [NEAR, "127.0.0.1:2"]
    assert not schedulers.is_time_to_look(100.0, bad)
    assert schedulers.is_time_to_look(100.0, good)
    assert not schedulers.is_time_to_look(100.0, good)
    assert schedulers.is_time_to_look(100.0 + LOOK_EVERY_S, bad)


def test_what_given_ones_say_of_themselves_counts_in_the_choice() -> None:
    schedulers = KnownSchedulers([NEAR], PLAIN, "safe")
    own = entry(
        NEAR, own=True, state=pb.SCHEDULER_STATE_DRAINING, load=pb.SchedulerLoad(running=2, waiting=1)
    )
    schedulers.saw(NEAR, [own, entry("127.0.0.1:2", adapters=["poet"])], 0.0)
    assert schedulers.loads == {NEAR: 3, "127.0.0.1:2": 0}
    assert schedulers.draining == {NEAR}
    rotation = Rotation([NEAR])
    rotation.use(schedulers.addresses, schedulers.loads, (), schedulers.adapters)
    for number in range(8):
        for key in (b"", b"%d" % number):
            assert rotation.order(0.0, key, "poet")[0] == "127.0.0.1:2"
    assert {rotation.order(0.0, b"", "m")[0] for _ in range(2)} == {NEAR, "127.0.0.1:2"}


def test_ten_thousand_entries_are_bounded_and_an_empty_or_ownerless_answer_changes_nothing() -> None:
    schedulers = known(NEAR, *(entry(f"127.0.0.1:{port}") for port in range(2, 10_002)))
    assert len(schedulers.addresses) == 1 + MAX_LEARNED
    before = schedulers.addresses
    schedulers.saw(NEAR, [], 0.0)
    schedulers.saw(NEAR, [entry("127.0.0.1:9")], 0.0)
    assert schedulers.addresses == before
    rotation = Rotation([NEAR])
    rotation.use(schedulers.addresses, schedulers.loads, schedulers.draining)
    assert len(rotation.order(0.0)) == MAX_TRIED
    schedulers.saw(NEAR, chain([entry(NEAR, own=True)], repeat(entry("127.0.0.1:2"))), 0.0)
    assert schedulers.addresses == (NEAR, "127.0.0.1:2")


def test_looks_are_rare_and_rarer_where_there_is_no_directory() -> None:
    schedulers = KnownSchedulers([NEAR], PLAIN, "safe")
    times = [now for now in range(1000) if schedulers.is_time_to_look(float(now))]
    assert times == [now for now in range(1000) if now % LOOK_EVERY_S == 0]
    schedulers.has_none(NEAR, 1000.0)
    times = [now for now in range(1000, 2000) if schedulers.is_time_to_look(float(now))]
    assert times[0] == 1000 + NO_DIRECTORY_S
    off = KnownSchedulers([NEAR], PLAIN, "off")
    assert not off.is_time_to_look(1e9)


def test_calls_go_by_the_load_that_the_directory_tells_and_last_to_those_that_drain() -> None:
    rotation = Rotation(["a:1"])
    rotation.use(("a:1", "b:1", "c:1"), {"b:1": 3}, {"c:1"})
    assert {rotation.order(0.0)[-1] for _ in range(3)} == {"c:1"}
    # The bound is 1.25 of the mean, rounded up: b has more than its share.
    for key in (b"%d" % number for number in range(20)):
        assert rotation.order(0.0, key)[0] == "a:1"
    rotation.began("b:1")
    rotation.use(("a:1",), {}, ())
    assert not rotation.is_idle("b:1")
    rotation.ended("b:1")
    assert rotation.is_idle("b:1")
