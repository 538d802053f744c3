"""What the server's choice of a stack is worth: with the client's rules, and caches that drop the oldest."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from paceline.affinity import affinity_key
from paceline.failover import Rotation
from paceline.requests import generate_request
from paceline_openai.beginnings import EXTRA_STREAMS, Beginnings

from tests.bench import affinity as long_chats
from tests.bench.door_routing import trace

PAGE = 16  # characters: of the oracle's tokens each is one


@dataclass
class Stacks:
    """Stacks with pages for prompts, and one client of all of them."""

    number: int
    pages: int
    at_once: int
    addresses: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)  # where each running chat is
    computed: Counter[str] = field(default_factory=Counter)  # pages
    cached: int = 0
    most_beyond_share: int = 0

    def __post_init__(self) -> None:
        self.addresses = self.addresses or [f"10.0.0.{host}:50051" for host in range(self.number)]
        self.caches = {one: OrderedDict[int, None]() for one in self.addresses}
        self.rotation = Rotation(self.addresses, EXTRA_STREAMS)
        self.beginnings, self.draw = Beginnings(), random.Random(7)

    def address(self, turns: list[dict[str, Any]]) -> str:
        """Where a chat goes."""
        request = generate_request(None, turns, None, {})
        key = affinity_key(request, self.beginnings.affinity_key(turns, self.addresses))
        return self.rotation.order(0.0, key)[0]

    def chat(self, turns: list[dict[str, Any]]) -> None:
        """Begin a chat when another one has ended."""
        if len(self.live) == self.at_once:
            self.rotation.ended(self.live.pop(self.draw.randrange(self.at_once)))
        address = self.address(turns)
        self.rotation.began(address)
        self.live.append(address)
        beyond = Counter(self.live)[address] - -(-5 * len(self.live) // (4 * self.number))
        self.most_beyond_share = max(self.most_beyond_share, beyond)
        prompt = "".join(turn["content"] for turn in turns)
        pages = [hash(prompt[:end]) for end in range(PAGE, len(prompt), PAGE)]
        cache = self.caches[address]
        found = next((place for place, page in enumerate(pages) if page not in cache), len(pages))
        self.cached += found
        self.computed[address] += len(pages) - found
        for page in reversed(pages):  # the ends are dropped first
            cache[page] = None
            cache.move_to_end(page)
        while len(cache) > self.pages:
            cache.popitem(last=False)

    @property
    def share(self) -> float:
        """Of the prompts' pages that were cached."""
        return self.cached / (self.cached + self.computed.total())

    @property
    def fullest(self) -> float:
        """Pages that the fullest stack computed, by the mean."""
        return max(self.computed.values()) * self.number / self.computed.total()


def test_chats_of_many_system_prompts_find_as_much_as_in_one_cache_of_all_stacks() -> None:
    chats = trace(400, 32)
    one = Stacks(1, 2400, at_once=8)
    several = [
        Stacks(2, 1200, at_once=8, addresses=[f"10.0.{run}.{host}:50051" for host in (1, 2)])
        for run in range(8)
    ]
    for stacks in (one, *several):
        for turns in chats:
            stacks.chat(turns)
    assert min(stacks.share for stacks in several) >= 0.985 * one.share
    assert max(stacks.fullest for stacks in several) <= 1.3
    assert max(stacks.most_beyond_share for stacks in several) <= EXTRA_STREAMS


def test_long_conversations_find_as_much_as_in_one_cache_and_no_stack_computes_far_more_than_others() -> None:
    one, four = Stacks(1, 4 * 12288, at_once=16), Stacks(4, 12288, at_once=16)
    chats: list[list[dict[str, Any]]] = []
    for number in range(200):
        system = long_chats.text(f"system {number % long_chats.SYSTEMS}", long_chats.SYSTEM_BYTES)
        chats.append([{"role": "system", "content": system}])
    order = [number for number in range(200) for _ in range(5)]
    random.Random(3).shuffle(order)
    for number in order:
        turns = chats[number]
        turns.append({"role": "user", "content": long_chats.text(f"{number} {len(turns)}", 300)})
        for stacks in (one, four):
            stacks.chat(turns)
        turns.append({"role": "assistant", "content": long_chats.text(f"answer {number} {len(turns)}", 24)})
    assert four.share >= 0.95 * one.share
    assert four.fullest <= 1.3
    assert four.most_beyond_share <= EXTRA_STREAMS


def test_a_prompt_that_all_ask_at_once_is_passed_on() -> None:
    stacks = Stacks(4, 12288, at_once=40)
    for number in range(40):
        stacks.chat([{"role": "system", "content": "x" * 600}, {"role": "user", "content": str(number % 2)}])
    assert max(Counter(stacks.live).values()) <= 13 + EXTRA_STREAMS
    assert stacks.most_beyond_share <= EXTRA_STREAMS


def test_the_loss_of_a_stack_moves_its_share_alone() -> None:
    stacks = Stacks(4, 12288, at_once=8)
    chats = trace(100, 32)
    before = [stacks.address(turns) for turns in chats]
    lost = stacks.addresses.pop()
    stacks.rotation.down(lost, 0.0)
    after = [stacks.address(turns) for turns in chats]
    moved = {index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other}
    assert moved == {index for index, one in enumerate(before) if one == lost} != set()
    assert len({after[index] for index in moved}) == 3
    stacks.addresses.append(lost)
    stacks.rotation.up(lost)
    assert [stacks.address(turns) for turns in chats] == before
