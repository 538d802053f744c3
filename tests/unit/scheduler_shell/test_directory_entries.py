"""Entries of the directory: how they are written and read, and which addresses they may have."""

from __future__ import annotations

from typing import Any

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.config import SchedulerSettings
from scheduler_service.directory.codec import add_entry, decode_entry
from scheduler_service.directory.directory import (
    Directory,
    Rank,
)
from scheduler_service.directory.places import is_here, one_spelling
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.model import ServiceState
from tests.support.checkout import ROOT
from tests.unit.scheduler_shell.listings import LISTING

TLS = ROOT / "tests" / "support" / "tls"


def entry_at(address: str) -> pb.SchedulerEntry:
    return pb.SchedulerEntry(address=address, model="m", instance=f"at-{address}", generation=1)


def test_an_entry_is_read_as_it_was_written() -> None:
    directory = Directory()
    directory.write(LISTING, "a team", Rank.ANNOUNCED, 10.0, 5.0)
    [entry] = directory
    response = pb.WatchSchedulersResponse()
    add_entry(response, entry, 11.0)
    add_entry(response, entry, 12.5)
    message = response.entries[1]
    assert (message.written_by, message.age_ms) == ("a team", 2500)
    assert decode_entry(message) == LISTING


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", ""),
        ("address", "no-port"),
        ("address", "host:0"),
        ("address", "host:99999"),
        ("address", "host:٣"),
        ("address", "0.0.0.0:1"),
        ("address", "ipv4:127.0.0.1:1"),
        ("address", ":50051"),
        ("address", "a" * 512 + ":1"),
        ("address", "two words:1"),
        ("address", "\x1b]0;x\x07:1"),
        ("tls_name", "x" * 257),
        ("model", "x" * 1025),
        ("instance", ""),
        ("model_fingerprint", b"x" * 257),
        ("adapters", ["a"] * 1025),
        ("adapters", ["a" * 128] * 257),
        ("adapters", [""]),
        ("generation", 0),
    ],
)
def test_an_entry_that_is_malformed_is_refused_by_field(field: str, value: object) -> None:
    good = {
        "address": "host:1", "model": "m", "instance": "i", "generation": 1,
    }  # fmt: skip
    with pytest.raises(ServiceError) as caught:
        decode_entry(pb.SchedulerEntry(**(good | {field: value})))  # type: ignore[arg-type]
    assert caught.value.reason is ErrorReason.INVALID_REQUEST
    assert caught.value.field == f"entry.{field}"


def test_a_state_that_is_not_known_here_is_none_that_gets_new_streams() -> None:
    entry = pb.SchedulerEntry(address="host:1", instance="i", generation=1)
    entry.MergeFromString(b"\x30\x63")  # state 99
    assert decode_entry(entry).state is ServiceState.NO_EXECUTOR


@pytest.mark.parametrize(
    ("given", "known", "here"),
    [
        ("10.0.0.1:050051", "10.0.0.1:50051", False),
        ("Host.Example.:1", "host.example:1", False),
        ("[2001:DB8:0::1]:1", "[2001:db8::1]:1", False),
        ("LocalHost:02", "localhost:2", True),
        ("a.localhost:1", "a.localhost:1", True),
        ("[0:0::1]:1", "[::1]:1", True),
        ("[::ffff:127.0.0.1]:1", "127.0.0.1:1", True),
        ("[::ffff:7f00:1]:1", "127.0.0.1:1", True),
    ],
)
def test_an_address_has_one_spelling_and_loopback_is_known_in_each(
    given: str, known: str, here: bool
) -> None:
    assert decode_entry(entry_at(given)).address == known
    assert is_here(given) is here
    assert one_spelling(known) == known


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "[::]",
        "[::ffff:0.0.0.0]",
        "0.0.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "[ff02::1]",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "1.2.3.4.5",
        "[fe80::1%eth0]",
        "%31.0.0.1",
        "bücher.example",
        "a..b",
        "-a",
        "unix:/run/x",
        "dns:///host",
        "user@host",
        "host/path",
        "::1",
    ],
)
def test_what_leads_to_no_one_host_or_has_several_readings_is_no_address(host: str) -> None:
    with pytest.raises(ServiceError, match=r"entry\.address"):
        decode_entry(entry_at(f"{host}:50051"))
    with pytest.raises(ValueError, match="advertise"):
        SchedulerSettings(executor=("127.0.0.1:1",), advertise=f"{host}:50051")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, ""),
        ({"tls": True}, "10.0.0.7"),
        ({"tls": True, "advertise_tls_name": "fleet.example"}, "fleet.example"),
    ],
)
def test_the_name_of_the_certificate_is_the_advertised_host_or_another_that_is_given(
    given: dict[str, Any], name: str
) -> None:
    given = dict(given)
    if given.pop("tls", False):
        given |= {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}
    settings = SchedulerSettings(executor=("127.0.0.1:1",), advertise="10.0.0.7:50051", **given)
    assert settings.advertised_tls_name == name


@pytest.mark.parametrize("lacks", ["advertise", "tls_cert"])
def test_a_name_for_a_certificate_that_nobody_would_see_is_refused(lacks: str) -> None:
    given: dict[str, Any] = {"advertise": "10.0.0.7:50051", "tls_cert": TLS / "server.pem"}
    given |= {"tls_key": TLS / "server.key", "advertise_tls_name": "fleet.example"}
    if lacks == "tls_cert":
        del given["tls_key"]
    del given[lacks]
    with pytest.raises(ValueError, match="--advertise-tls-name needs"):
        SchedulerSettings(executor=("127.0.0.1:1",), **given)
