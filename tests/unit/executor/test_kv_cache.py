"""The page books, against a shadow model that remembers what every page holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor_service.cache.block_table import BlockTable
from executor_service.cache.kv_cache import KvCache, LedgerError, OutOfPages, prefix_root

PAGE, TOTAL = 4, 12
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def opened(cache: KvCache, tokens: list[int], salt: bytes = b"", publish: bool = True) -> BlockTable:
    table, hit = cache.open(salt, array(tokens))
    cache.reserve(table, hit, len(tokens))
    if publish:
        cache.publish(table, array(tokens), len(tokens))
    return table


@dataclass
class Shadow:
    table: BlockTable
    salt: bytes
    tokens: list[int] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Opens, extends, truncates, forks, publishes and releases; content is checked page by page."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(TOTAL, PAGE)
        self.live: list[Shadow] = []
        self.content: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}  # (page, slot) → all up to it

    def write(self, shadow: Shadow, start: int) -> None:
        for position in range(start, len(shadow.tokens)):
            page = shadow.table.at(position // PAGE)
            known = (shadow.salt, tuple(shadow.tokens[: position + 1]))
            self.content[page, position % PAGE] = known

    def reserve(self, shadow: Shadow, end: int) -> bool:
        start = len(shadow.tokens)
        before = (self.cache.free, self.cache.cached, shadow.table.pages().tolist())
        missing = -(-end // PAGE) - shadow.table.count
        try:
            copy = self.cache.reserve(shadow.table, start, end)
        except OutOfPages:
            assert before == (self.cache.free, self.cache.cached, shadow.table.pages().tolist())
            assert missing + 1 > before[0] + before[1], "refused though there was room"
            return False
        if copy:
            for slot in range(PAGE):
                if (copy[0], slot) in self.content:
                    self.content[copy[1], slot] = self.content[copy[0], slot]
        return True

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"x"]))
    def open(self, tokens: list[int], salt: bytes) -> None:
        table, hit = self.cache.open(salt, array(tokens))
        assert hit % PAGE == 0
        assert hit < len(tokens)
        shadow = Shadow(table, salt, tokens[:hit])
        if not self.reserve(shadow, len(tokens)):
            self.cache.cut(table, 0)
            return
        shadow.tokens = list(tokens)
        self.write(shadow, hit)
        self.live.append(shadow)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=TOKENS)
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        shadow = data.draw(st.sampled_from(self.live))
        start = len(shadow.tokens)
        if self.reserve(shadow, start + len(more)):
            shadow.tokens += more
            self.write(shadow, start)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        shadow = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, len(shadow.tokens)))
        self.cache.cut(shadow.table, length)
        assert shadow.table.count == -(-length // PAGE)
        del shadow.tokens[length:]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        shadow = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, len(shadow.tokens)))
        free = self.cache.free
        fork = Shadow(self.cache.fork(shadow.table, length), shadow.salt, shadow.tokens[:length])
        assert self.cache.free == free, "a fork takes no page"
        self.live.append(fork)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        shadow = data.draw(st.sampled_from(self.live))
        self.cache.publish(shadow.table, array(shadow.tokens), len(shadow.tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        shadow = data.draw(st.sampled_from(self.live))
        assume(shadow in self.live)
        self.live = [other for other in self.live if other is not shadow]
        self.cache.cut(shadow.table, 0)

    @invariant()
    def the_books_balance(self) -> None:
        self.cache.check(shadow.table for shadow in self.live)
        assert self.cache.free + self.cache.cached + self.cache.owned == TOTAL

    @invariant()
    def every_sequence_reads_its_own_content(self) -> None:
        for shadow in self.live:
            for position in range(len(shadow.tokens)):
                page = shadow.table.at(position // PAGE)
                expected = (shadow.salt, tuple(shadow.tokens[: position + 1]))
                assert self.content[page, position % PAGE] == expected


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_opening_leaves_at_least_one_token_to_compute() -> None:
    cache = KvCache(TOTAL, PAGE)
    opened(cache, [1] * 8)
    assert cache.open(b"", array([1] * 8))[1] == 4
    assert cache.open(b"", array([1] * 9))[1] == 8


def test_roots_differ_by_salt_and_adapter_and_are_as_ever_without_one() -> None:
    assert prefix_root(b"s") == hashlib.sha256(b"paceline/prefix/1:s").digest()
    adapter = bytes(range(32))
    roots = [
        prefix_root(salt, fingerprint)
        for salt, fingerprint in (
            (b"", b""), (b"s", b""), (b"", adapter), (b"s", adapter), (b"", adapter[::-1]),
            (adapter, b""), (adapter, adapter), (b"s" + adapter[:-1], adapter[-1:] + adapter[:-1]),
        )
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)


def test_a_salt_is_a_namespace() -> None:
    cache = KvCache(TOTAL, PAGE)
    opened(cache, [1] * 8, salt=b"a")
    assert cache.open(b"b", array([1] * 9))[1] == 0
    assert cache.open(b"a", array([1] * 9))[1] == 8


def test_only_published_pages_are_found() -> None:
    cache = KvCache(TOTAL, PAGE)
    opened(cache, [1] * 8, publish=False)
    assert cache.open(b"", array([1] * 9))[1] == 0


def test_released_pages_stay_findable_until_they_are_needed() -> None:
    cache = KvCache(4, PAGE)
    cache.cut(opened(cache, [1] * 16), 0)
    assert (cache.free, cache.cached, cache.owned) == (0, 4, 0)
    assert cache.open(b"", array([1] * 17))[0].count == 4


def test_eviction_takes_the_least_recently_used_end_of_a_prefix_first() -> None:
    cache = KvCache(4, PAGE)
    cache.cut(opened(cache, [1] * 8), 0)
    cache.cut(opened(cache, [2] * 8), 0)
    table = opened(cache, [3] * 4)
    assert cache.evictions == 1
    assert cache.open(b"", array([1] * 9))[1] == 4, "the older prefix lost its last page"
    assert cache.open(b"", array([2] * 9))[1] == 8
    assert table.count == 1


def test_pages_in_use_are_never_evicted() -> None:
    cache = KvCache(4, PAGE)
    opened(cache, [1] * 12)
    table, _ = cache.open(b"", array([2] * 8))
    with pytest.raises(OutOfPages, match="needs 2 pages, 1 are available"):
        cache.reserve(table, 0, 8)
    assert table.count == 0


def test_the_copy_of_a_shared_page_counts_in_the_reservation() -> None:
    cache = KvCache(2, PAGE)
    source = opened(cache, [1] * 6, publish=False)
    fork = cache.fork(source, 6)
    with pytest.raises(OutOfPages, match="needs 1 pages, 0"):
        cache.reserve(fork, 6, 7)
    with pytest.raises(OutOfPages):
        cache.reserve(source, 6, 7)
    cache.cut(fork, 0)
    assert cache.reserve(source, 6, 7) is None, "nobody shares it any more"


def test_a_truncated_published_page_is_copied_before_it_is_written() -> None:
    cache = KvCache(TOTAL, PAGE)
    table = opened(cache, [1] * 8)
    last = table.at(1)
    cache.cut(table, 6)
    assert cache.reserve(table, 6, 7) == (last, table.at(1))
    assert table.at(1) != last
    assert cache.open(b"", array([1] * 9))[1] == 8, "the published one is still there"


def test_a_reservation_of_nothing_takes_nothing() -> None:
    cache = KvCache(TOTAL, PAGE)
    source = opened(cache, [1] * 6)
    fork = cache.fork(source, 6)
    assert cache.reserve(fork, 6, 6) is None
    assert cache.copies == 0


def test_wrong_books_are_noticed() -> None:
    cache = KvCache(TOTAL, PAGE)
    table = opened(cache, [1] * 8)
    with pytest.raises(LedgerError, match="1 references are counted"):
        cache.check([])
    cache.check([table])
    cache._free.append(table.at(0))
    with pytest.raises(LedgerError, match="free, cached and owned"):
        cache.check([table])
