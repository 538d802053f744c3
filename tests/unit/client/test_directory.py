"""Which schedulers of a directory a client uses, and which of them get its token.

tests/scenario/directory.json has the promises that clients of all languages hold: its cases are played here.
"""

from __future__ import annotations

import json
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from paceline.channel import Security
from paceline.directory import MAX_LEARNED, KnownSchedulers
from paceline.errors import Unavailable
from paceline.failover import MAX_TRIED, Attempts, Rotation
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.support.checkout import ROOT

NEAR = "127.0.0.1:1"
PLAIN, TLS = Security(token="secret"), Security(ca_file=Path("ca.pem"), token="secret")
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests" / "scenario" / "directory.json").read_text())
LOOKS = 6  # as many as the schedulers that are asked in turn, and more


def entry(address: str, *, own: bool = False, **told: Any) -> pb.SchedulerEntry:
    """An entry, by the names and defaults of directory.json."""
    return pb.SchedulerEntry(
        address=address,
        model=told.get("model", "m"),
        model_fingerprint=told.get("fingerprint", "print").encode(),
        instance=told.get("instance", f"of {address}"),
        written_by="" if own else "somebody",
        tls_name=told.get("tls_name", ""),
        state=pb.SchedulerState.Value("SCHEDULER_STATE_" + told.get("state", "SERVING")),
        load=pb.SchedulerLoad(running=told.get("running", 0), waiting=told.get("waiting", 0)),
        adapters=told.get("adapters", ()),
    )


def known(given: str, *entries: pb.SchedulerEntry) -> KnownSchedulers:
    schedulers = KnownSchedulers([given], PLAIN, "safe")
    schedulers.saw(given, [entry(given, own=True), *entries], 0.0)
    return schedulers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_each_step_of_a_case_is_as_it_says(case: dict[str, Any]) -> None:
    schedulers = KnownSchedulers(case["given"], TLS if case["tls"] else PLAIN, case["use"])
    for step in case["steps"]:
        found, expected = outcome(schedulers, step)
        assert found == expected, step


def outcome(schedulers: KnownSchedulers, step: dict[str, Any]) -> tuple[object, object]:
    """What a step finds, and what it expects; both None for one that only tells something."""
    at = float(step.get("at_s", 0))
    found: object = None
    expected: object = None
    match next(iter(step)):
        case "saw":
            ports = range(*step.get("ports", (0, 0)))
            listed = (*step["entries"], *({"address": f"127.0.0.1:{port}"} for port in ports))
            schedulers.saw(step["saw"], [entry(**one) for one in listed], at)
        case "lost":
            schedulers.lost(step["lost"], at)
        case "has_none":
            schedulers.has_none(step["has_none"], at)
        case "refused":
            schedulers.refused(caller(step["refused"]), at)
        case "distrust":
            schedulers.distrust(step["distrust"])
        case "addresses" | "draining" | "foreign" as name:
            found, expected = set(getattr(schedulers, name)), set(step[name])
        case "count":
            found, expected = len(schedulers.addresses), step["count"]
        case "loads":
            found, expected = schedulers.loads, step["loads"]
        case "adapters":
            found, expected = {one: sorted(has) for one, has in schedulers.adapters.items()}, step["adapters"]
        case "tls_name":
            address, expected = step["tls_name"]
            security = schedulers.security(address)
            found = None if security is None else security.server_name
        case "reports":
            reported = step["fingerprint"].encode()
            found, expected = schedulers.is_what_it_says(step["reports"], reported), step["is"]
        case "checked":
            found, expected = schedulers.is_checked(step["checked"]), step["is"]
        case "asks":
            down = step.get("down", ())
            asked = {schedulers.teller(at, lambda address, _: address in down) for _ in range(LOOKS)}
            found, expected = asked, set(step["asks"])
        case "time_to_look_s":
            who = caller(step.get("caller", "good"))
            found, expected = schedulers.is_time_to_look(step["time_to_look_s"], who), step["is"]
        case other:
            raise AssertionError(f"no such step: {other}")
    return found, expected


def caller(name: str) -> Any:
    return Security(token=name).metadata


def test_another_fingerprint_gets_new_calls_once_the_present_one_takes_none_and_no_stream_that_began() -> (
    None
):
    def attempts() -> Attempts:
        return Attempts(rotation, 0.0, timeout_s=None, failover_timeout_s=9.0, key=b"k")

    def refused(call: Attempts) -> str:
        assert call.failed(Unavailable("draining", reason="DRAINING", retry_after_s=1.0), 0.0) == 0.0
        return call.address

    old, new = "127.0.0.1:2", "127.0.0.1:3"
    schedulers = known(NEAR, entry(old), entry(new, fingerprint="new"))
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
    schedulers.saw(new, [entry(new, own=True, fingerprint="new")], 1.0)
    assert new not in schedulers.foreign


def test_what_given_ones_say_of_themselves_counts_in_the_choice() -> None:
    schedulers = KnownSchedulers([NEAR], PLAIN, "safe")
    own = entry(NEAR, own=True, state="DRAINING", running=2, waiting=1)
    schedulers.saw(NEAR, [own, entry("127.0.0.1:2", adapters=["poet"])], 0.0)
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
