"""The bookkeeping of pages: which page holds which tokens of which sequence, but not the KV itself.

At any time a page is exactly one of
    free     in no block table, and its content is unused
    owned    in at least one block table; `_references` counts in how many
    cached   in no block table, but its content can still be shared; evicted least recently used first
and free + cached + owned = total (`check`). An owned page may also be *published*: the prefix cache knows it
by the hash of all tokens up to its end (SHA-256, chained page by page from a root that covers salt and
adapter), so that a later sequence with the same beginning can share it. Cached pages are published.

A page that is published, or in several block tables, is never written: `reserve` replaces it by a private
copy first. Page 0 is scratch memory for backends and in no block table.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from executor_service.cache.block_table import BlockTable
from executor_service.contract.plan import TokenIds


class OutOfPages(Exception):
    """A reservation can't be met; nothing has changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} pages, {available} are available")
        self.needed, self.available = needed, available


class LedgerError(AssertionError):
    """The page counts are inconsistent: a sequence may be reading another's pages."""


def prefix_root(salt: bytes, adapter: bytes = b"") -> bytes:
    """The hash of an empty prefix: pages are shared only under an equal one.

    `adapter`: its fingerprint; empty: none.
    """
    if not adapter:
        return hashlib.sha256(b"paceline/prefix/1:" + salt).digest()
    length = len(salt).to_bytes(4, "little")
    return hashlib.sha256(b"paceline/prefix/2:" + length + salt + adapter).digest()


class KvCache:
    """`total` pages of `page_size` tokens, numbered 1..total, and the prefix cache over them."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total, self.page_size = total, page_size
        self._free = list(range(total, 0, -1))
        self._references = [0] * (total + 1)
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.evictions = self.copies = self.hit_tokens = self.query_tokens = 0
        self.touched = 0  # pages that were ever taken: those given back are taken first

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of cached pages. They are evicted when no page is free."""
        return len(self._cached)

    @property
    def owned(self) -> int:
        """Number of owned pages."""
        return self.total - len(self._free) - len(self._cached)

    def pages_for(self, length: int) -> int:
        """Number of pages that hold `length` tokens."""
        return -(-length // self.page_size)

    def open(self, salt: bytes, tokens: TokenIds, adapter: bytes = b"") -> tuple[BlockTable, int]:
        """A table that shares the longest published prefix of `tokens`, and the length of that prefix.

        The length is a multiple of the page size and at most len(tokens) - 1, so that at least one token is
        left to compute. No free page is used. The caller calls `count_hit` when it commits the opening.
        """
        table = BlockTable(prefix_root(salt, adapter))
        parent = table.root
        for index in range((len(tokens) - 1) // self.page_size):
            parent = self._chain(parent, tokens, index)
            page = self._page_of.get(parent)
            if page is None:
                break
            self._take(page)
            table.append(page)
            table.hashes.append(parent)
        return table, table.count * self.page_size

    def count_hit(self, tokens: int, hit: int) -> None:
        """Count an opening of `tokens` tokens, of which `hit` were cached, in the statistics."""
        self.query_tokens += tokens
        self.hit_tokens += hit

    def must_copy(self, table: BlockTable, start: int) -> bool:
        """Whether position `start` is in a page that must not be written: shared or published."""
        index = start // self.page_size
        if index >= table.count:
            return False
        page = table.at(index)
        return self._references[page] > 1 or page in self._hash_of

    def reserve(self, table: BlockTable, start: int, end: int) -> tuple[int, int] | None:
        """Make positions start .. end-1 of a sequence of `start` tokens writable.

        Returns (source, target) if the partly filled last page was replaced by a private page: the caller
        copies its KV before anything is written. Raises OutOfPages, and then has changed nothing.
        """
        missing = max(self.pages_for(end) - table.count, 0)
        index = start // self.page_size
        shared = table.at(index) if start < end and self.must_copy(table, start) else 0
        needed = missing + (shared > 0)
        if needed > len(self._free) + len(self._cached):
            raise OutOfPages(needed, len(self._free) + len(self._cached))
        copy = None
        if shared:
            copy = (shared, self._new())
            table.replace(index, copy[1])
            self._drop(shared)
            self.copies += 1
        for _ in range(missing):
            table.append(self._new())
        if start < end:
            table.private_end = table.count * self.page_size
        return copy

    def cut(self, table: BlockTable, length: int) -> None:
        """Release all pages after the first `length` tokens, the last one first."""
        keep = self.pages_for(length)
        while table.count > keep:
            table.count -= 1
            self._drop(table.at(table.count))
        table.private_end = 0  # what is kept of a full page may be published
        del table.hashes[length // self.page_size :]

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """A table that shares the first `length` tokens; a partial page is copied before it is written."""
        fork = BlockTable(table.root)
        table.private_end = 0
        for index in range(self.pages_for(length)):
            page = table.at(index)
            self._take(page)
            fork.append(page)
        fork.hashes = table.hashes[: length // self.page_size]
        return fork

    def publish(self, table: BlockTable, tokens: TokenIds, length: int) -> None:
        """Publish the full pages of the first `length` tokens, whose KV is finite.

        A page whose content is already published in another page stays unpublished.
        """
        for index in range(len(table.hashes), length // self.page_size):
            digest = self._chain(table.hashes[-1] if index else table.root, tokens, index)
            table.hashes.append(digest)
            page = table.at(index)
            if digest not in self._page_of and page not in self._hash_of:
                self._page_of[digest] = page
                self._hash_of[page] = digest

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Recount all pages from the block tables. Raises LedgerError at the first difference."""
        counted = np.zeros(self.total + 1, np.int64)
        for table in tables:
            np.add.at(counted, table.pages(), 1)
            end = table.private_end
            if end > len(table.hashes) * self.page_size and self.must_copy(table, end - 1):
                raise LedgerError(
                    f"position {end - 1} of a sequence would be written to a page that others read"
                )
        references = np.array(self._references)
        if (different := np.flatnonzero(counted != references)).size:
            page = int(different[0])
            raise LedgerError(
                f"page {page} is in {counted[page]} tables, {references[page]} references are counted"
            )
        state = np.zeros(self.total + 1, np.int64)
        state[counted > 0] += 1
        np.add.at(state, np.array(self._free, np.int64), 1)
        np.add.at(state, np.fromiter(self._cached, np.int64, len(self._cached)), 1)
        if (different := np.flatnonzero(state[1:] != 1)).size or state[0]:
            page = int(different[0]) + 1 if different.size else 0
            raise LedgerError(f"page {page} is in {state[page]} of free, cached and owned")
        if self.free + self.cached + self.owned != self.total:
            raise LedgerError("free + cached + owned is not total")
        if not self._cached.keys() <= self._hash_of.keys():
            raise LedgerError("a cached page has no hash")
        if {page: digest for digest, page in self._page_of.items()} != self._hash_of:
            raise LedgerError("pages and hashes do not correspond")

    def _chain(self, parent: bytes, tokens: TokenIds, index: int) -> bytes:
        """The hash of the page at `index`, where `parent` is the hash of the page before it, or the root."""
        page = tokens[index * self.page_size : (index + 1) * self.page_size]
        return hashlib.sha256(parent + page.tobytes()).digest()

    def _new(self) -> int:
        """Take a free page, or else evict a cached one. The caller has checked that there is either."""
        if self._free:
            page = self._free.pop()
            if page > self.touched:
                self.touched = page
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
            self.evictions += 1
        self._references[page] = 1
        return page

    def _take(self, page: int) -> None:
        """Count one more reference to a page that is owned or cached."""
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def _drop(self, page: int) -> None:
        """Count one reference less. A page without references becomes cached if published, else free."""
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._free.append(page)
