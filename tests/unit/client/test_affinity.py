"""The affinity key, against the vectors in scheduler.proto: AFFINITY."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.affinity import affinity_key, choice, preference
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.support.checkout import ROOT

ADDRESSES = [f"10.0.0.{host}:50051" for host in (1, 2, 3)]


def chat(*turns: tuple[str, str]) -> pb.GenerateRequest:
    messages = [pb.Message(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(messages=pb.Messages(messages=messages))


PARTS = [pb.ContentPart(text="h"), pb.ContentPart(text="i")]
IN_PARTS = pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="user", parts=PARTS)]))
VECTORS = {
    'text "hello"': pb.GenerateRequest(text="hello"),
    'text "hello", model "m", cache_salt "s"': pb.GenerateRequest(text="hello", model="m", cache_salt="s"),
    'text of 1,023 "a", then "é"': pb.GenerateRequest(text="a" * 1023 + "é"),
    'text of 1,023 "a"': pb.GenerateRequest(text="a" * 1023),
    "token ids 0 to 299": pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(300))),
    "token ids 0 to 255": pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(256))),
    'system "be brief", user "hi"': chat(("system", "be brief"), ("user", "hi")),
    'the same, assistant "hey", user "go on"': chat(
        ("system", "be brief"), ("user", "hi"), ("assistant", "hey"), ("user", "go on")
    ),
    'user "hi", or its parts "h" and "i"': IN_PARTS,
    'assistant "a", tool "b"': chat(("assistant", "a"), ("tool", "b")),
}


def line(name: str, key: bytes) -> str:
    """A line of the table, as the proto has it."""
    order = " ".join(re.findall(r"\.(\d):", " ".join(preference(key, ADDRESSES))))
    return f"//   {name:<42}{key[:8].hex()}  {order}\n"


def test_the_vectors_of_the_contract() -> None:
    proto = (ROOT / "protos/paceline/scheduler/v1/scheduler.proto").read_text()
    for name, request in VECTORS.items():
        assert line(name, affinity_key(request)) in proto
    assert line('the caller\'s own "a key", any prompt', affinity_key(chat(), "a key")) in proto


def test_a_conversation_keeps_its_key_as_it_grows_and_parts_are_joined() -> None:
    keys = [affinity_key(request) for request in VECTORS.values()]
    assert keys[6] == keys[7]
    assert affinity_key(IN_PARTS) == affinity_key(chat(("user", "hi")))


def test_a_scheduler_above_its_share_passes_on_to_the_next() -> None:
    key = affinity_key(pb.GenerateRequest(text="hello"))
    first, second, third = preference(key, ADDRESSES)
    assert choice(key, dict.fromkeys(ADDRESSES, 7)) == first
    assert choice(key, {first: 10, second: 0, third: 0}) == second  # at most ceil(1.25 * 11 / 3) = 5
    assert choice(key, {first: 4, second: 3, third: 3}) == first
    with pytest.raises(ValueError, match="no scheduler"):
        choice(key, {})


def test_who_claims_that_nobody_is_there_gets_no_more_than_a_share_of_the_clients_streams() -> None:
    liar, *honest = addresses = [f"10.0.0.{host}:50051" for host in range(1, 5)]
    live = dict.fromkeys(addresses, 0)
    for number in range(400):
        key = affinity_key(pb.GenerateRequest(text=f"conversation {number}"))
        live[choice(key, live, {liar: 0, **dict.fromkeys(honest, 400)})] += 1
    assert live[liar] <= 1.25 * 401 / 4 + 1
    # One that says the truth, and has more than its share of all clients' streams, passes on.
    assert choice(key, dict.fromkeys(addresses, 0), {**dict.fromkeys(addresses, 2), liar: 100}) != liar


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_there_is_always_a_choice_and_a_loss_moves_its_share_alone(key: bytes, loads: list[int]) -> None:
    addresses = [f"host-{number}:1" for number in range(len(loads))]
    live = dict(zip(addresses, loads, strict=True))
    assert choice(key, live) in addresses
    assert choice(key, live, dict(zip(addresses, reversed(loads), strict=True))) in addresses
    order = preference(key, addresses)
    assert preference(key, order[1:]) == order[1:]
