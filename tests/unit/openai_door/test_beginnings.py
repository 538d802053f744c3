"""Which chats share an affinity key: as many of one system prompt as make a part of a stack's share."""

from __future__ import annotations

from typing import Any

from paceline_openai.beginnings import Beginnings


def chat(system: int | str, question: int, turns: int = 1) -> list[dict[str, Any]]:
    """A chat whose system prompt is long."""
    more = [
        {"role": role, "content": str(turn)} for turn in range(1, turns) for role in ("assistant", "user")
    ]
    first = [{"role": "system", "content": f"{system} " * 512}, {"role": "user", "content": str(question)}]
    return first + more


def keys(beginnings: Beginnings, systems: int, stacks: int, chats: int = 1000) -> dict[int, set[str]]:
    """The keys of so many chats, by system prompt; of the last half, when the shares are known."""
    found: dict[int, set[str]] = {system: set() for system in range(systems)}
    for number in range(chats):
        key = beginnings.affinity_key(chat(number % systems, number), stacks)
        if number >= chats // 2:
            found[number % systems].add(key)
    return found


def test_chats_of_a_rare_system_prompt_have_one_key_and_those_of_others_have_others() -> None:
    found = keys(Beginnings(), systems=32, stacks=2)
    assert {len(one) for one in found.values()} == {1}
    assert len(set().union(*found.values())) == 32


def test_a_more_frequent_prompt_has_more_keys_and_one_beyond_a_stacks_share_the_clients_own() -> None:
    assert {len(one) for one in keys(Beginnings(), systems=8, stacks=4).values()} == {4}
    assert keys(Beginnings(), systems=2, stacks=4) == {0: {""}, 1: {""}}


def test_turns_keep_their_key_while_shares_vary() -> None:
    beginnings = Beginnings()
    keys(beginnings, systems=9, stacks=4)
    first = beginnings.affinity_key(chat(0, 5), 4)
    for turn in range(2, 40):
        keys(beginnings, systems=9, stacks=4, chats=50)
        assert beginnings.affinity_key(chat(0, 5, turn), 4) == first != ""


def test_the_model_and_the_salt_are_a_part_of_the_beginning() -> None:
    beginnings = Beginnings()
    found = {beginnings.affinity_key(chat(0, 1), 2, *scope) for scope in (("a", ""), ("b", ""), ("a", "b"))}
    assert len(found) == 3


def test_short_system_prompts_and_a_single_stack_need_no_key() -> None:
    short = [{"role": "system", "content": "x" * 511}, {"role": "user", "content": "?"}]
    beginnings = Beginnings()
    assert beginnings.affinity_key(short, 2) == beginnings.affinity_key(chat(0, 1), 1) == ""
    assert beginnings.affinity_key([{"role": "user", "content": "x" * 1000}], 2) == ""


def test_what_is_remembered_is_bounded() -> None:
    beginnings = Beginnings()
    for number in range(5000):
        beginnings.affinity_key(chat(number, 1), 2)
    assert len(beginnings._counts) <= 2048
    assert beginnings._keys.keys() == beginnings._counts.keys()
