"""Which chats share an affinity key: as many of one system prompt as make a part of a stack's share."""

from __future__ import annotations

from collections import Counter
from typing import Any

from paceline.affinity import own_key, preference
from paceline_openai.beginnings import Beginnings

TWO, FOUR = ([f"10.0.0.{host}:50051" for host in range(number)] for number in (2, 4))


def chat(system: int | str, question: int, turns: int = 1) -> list[dict[str, Any]]:
    """A chat whose system prompt is long."""
    more = [
        {"role": role, "content": str(turn)} for turn in range(1, turns) for role in ("assistant", "user")
    ]
    first = [{"role": "system", "content": f"{system} " * 512}, {"role": "user", "content": str(question)}]
    return first + more


def keys(beginnings: Beginnings, systems: int, stacks: list[str], chats: int = 1000) -> dict[int, set[str]]:
    """The keys of so many chats, by system prompt; of the last half, when the shares are known."""
    found: dict[int, set[str]] = {system: set() for system in range(systems)}
    for number in range(chats):
        key = beginnings.affinity_key(chat(number % systems, number), stacks)
        if number >= chats // 2:
            found[number % systems].add(key)
    return found


def test_chats_of_a_rare_system_prompt_have_one_key_and_those_of_others_have_others() -> None:
    found = keys(Beginnings(), systems=32, stacks=TWO)
    assert {len(one) for one in found.values()} == {1}
    assert len(set().union(*found.values())) == 32


def test_a_more_frequent_prompt_has_more_keys_and_one_beyond_a_stacks_share_the_clients_own() -> None:
    assert {len(one) for one in keys(Beginnings(), systems=8, stacks=FOUR).values()} == {4}
    assert keys(Beginnings(), systems=2, stacks=FOUR) == {0: {""}, 1: {""}}


def test_turns_keep_their_key_while_a_prompts_share_varies_about_half_a_key() -> None:
    """A quarter of all chats has 8 keys, so 3 of 64 have 1.5; in some blocks it is more, in others less."""
    beginnings, found = Beginnings(), dict[int, set[str]]()
    for own in (*[3] * 40, *(2, 4, 2, 4, 4, 2) * 25):
        for number in range(64 - own):
            beginnings.affinity_key(chat(number % 16 + 1, number), FOUR)
        for question in range(own):
            found.setdefault(question, set()).add(beginnings.affinity_key(chat(0, question), FOUR))
    assert {len(keys) for keys in found.values()} == {1}


def test_each_stack_has_as_many_system_prompts() -> None:
    """Chance alone gives one of two stacks 20 of 32 in every fifth case."""
    for run in range(20):
        beginnings, stacks = Beginnings(), [f"10.0.{run}.{host}:50051" for host in (1, 2)]
        chosen = {beginnings.affinity_key(chat(number, 1), stacks) for number in range(32)}
        assert len(chosen) == 32
        first = Counter(preference(own_key(key), stacks)[0] for key in chosen)
        assert abs(first[stacks[0]] - 16) <= 1


def test_the_model_and_the_salt_are_a_part_of_the_beginning() -> None:
    beginnings = Beginnings()
    found = {beginnings.affinity_key(chat(0, 1), TWO, *scope) for scope in (("a", ""), ("b", ""), ("a", "b"))}
    assert len(found) == 3


def test_short_system_prompts_and_a_single_stack_need_no_key() -> None:
    short = [{"role": "system", "content": "x" * 511}, {"role": "user", "content": "?"}]
    beginnings = Beginnings()
    assert beginnings.affinity_key(short, TWO) == beginnings.affinity_key(chat(0, 1), TWO[:1]) == ""
    assert beginnings.affinity_key([{"role": "user", "content": "x" * 1000}], TWO) == ""


def test_what_is_remembered_is_bounded() -> None:
    beginnings = Beginnings()
    for number in range(5000):
        beginnings.affinity_key(chat(number, 1), TWO)
    assert len(beginnings._counts) <= len(beginnings._chosen) <= 2048
    assert beginnings._keys.keys() == beginnings._counts.keys()
    assert beginnings._total == beginnings._counts.total()
    assert beginnings._at.total() == len(beginnings._chosen)
