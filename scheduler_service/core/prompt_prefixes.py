"""Which prompts are being computed, and which were: so that a beginning they share is computed once.

A prompt whose beginning another one is computing waits for that one's end, and finds the beginning in the
executor's prefix cache then. Begun together, both would compute it. What was computed before is likely to be
in the cache, and is not waited for; where the executor has dropped it, it is computed again by each.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from hashlib import blake2b

from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.shared_prefixes import ID_BYTES, common

MIN_AWAITED_TOKENS = 128
"""A shorter beginning is not waited for: a GPU computes it in about the time of a further step."""
MAX_PROMPTS = 1024
"""Prompts that are remembered as computed, at most."""
MAX_BYTES = 8 << 20
"""Of these, at 4 bytes a token."""
_SPACE_BYTES = 8  # in front of a prompt: prompts of other adapters and salts have nothing in common with it


class PromptPrefixes:
    """The prompts of sequences that are computing theirs, and of earlier ones."""

    def __init__(self) -> None:
        # Sorted lists: what shares most with a prompt is a neighbour of the place where it would be.
        self._computing: list[tuple[bytes, int]] = []  # with the cache's id
        self._sequences: dict[int, tuple[LiveSequence, bytes]] = {}  # by that
        self._known: list[bytes] = []  # likely to be in the prefix cache; none begins with another
        self._age: OrderedDict[bytes, None] = OrderedDict()  # the same, the oldest first
        self._bytes = 0

    def begins(self, sequence: LiveSequence) -> None:
        """A sequence was given a cache, and computes its prompt from now on."""
        if _usable(sequence):
            packed = _packed(sequence)
            self._sequences[sequence.cache_id] = sequence, packed
            insort(self._computing, (packed, sequence.cache_id))

    def ends(self, sequence: LiveSequence, *, computed: bool) -> None:
        """It computes its prompt no longer: all of it is `computed`, or it is about to lose its cache."""
        if (found := self._sequences.pop(sequence.cache_id, None)) is None:
            return
        packed = found[1]
        del self._computing[bisect_left(self._computing, (packed, sequence.cache_id))]
        if computed:
            self._remember(packed)

    def forget(self) -> None:
        """The executor is lost, and its prefix cache with it."""
        self._known.clear()
        self._age.clear()
        self._bytes = 0

    def awaited(self, sequence: LiveSequence, page_size: int) -> tuple[LiveSequence, int] | None:
        """A sequence that is computing a beginning of this one's prompt, and how many tokens, in whole pages.

        None: nobody computes so much more of it than was computed before that waiting is worth it.
        """
        usable = _usable(sequence)
        if not self._computing or usable < MIN_AWAITED_TOKENS:
            return None
        packed = _packed(sequence)
        at = bisect_left(self._computing, (packed, 0))
        best, leader = 0, None
        for other, cache_id in self._computing[max(0, at - 1) : at + 1]:
            if (tokens := _shared(packed, other)) > best:
                best, leader = tokens, self._sequences[cache_id][0]
        best = min(best, usable) // page_size * page_size
        # Its end is waited for, as pages are shared from then on.
        if leader is None or 2 * best < len(leader.tokens) - leader.kv:
            return None
        at = bisect_left(self._known, packed)
        known = max((_shared(packed, other) for other in self._known[max(0, at - 1) : at + 1]), default=0)
        return (leader, best) if best - max(known, sequence.expected_hit) >= MIN_AWAITED_TOKENS else None

    def _remember(self, packed: bytes) -> None:
        known = self._known
        at = bisect_left(known, packed)
        if at < len(known) and known[at].startswith(packed):
            self._age.move_to_end(known[at])
            return
        if at and packed.startswith(known[at - 1]):  # of the chat's turn before
            at -= 1
            self._drop(at)
        known.insert(at, packed)
        self._age[packed] = None
        self._bytes += len(packed)
        while len(known) > MAX_PROMPTS or self._bytes > MAX_BYTES:
            self._drop(bisect_left(known, next(iter(self._age))))

    def _drop(self, at: int) -> None:
        packed = self._known.pop(at)
        del self._age[packed]
        self._bytes -= len(packed)

    def check_integrity(self, computing: set[int]) -> None:
        """Compare with the caches of the sequences that compute their prompts. Raises AssertionError."""
        assert set(self._sequences) <= computing, "a sequence that computes no prompt is waited for"
        assert sorted(self._computing) == self._computing, "prompts are out of order"
        assert {cache_id for _, cache_id in self._computing} == set(self._sequences), "prompts are miscounted"
        assert set(self._age) == set(self._known), "known prompts are miscounted"
        assert self._bytes == sum(map(len, self._known)) <= MAX_BYTES, "bytes of known prompts are miscounted"


def _usable(sequence: LiveSequence) -> int:
    """First tokens that may come from the prefix cache, if they are worth a look; of evaluations none."""
    if sequence.end_kv or sequence.next_score < sequence.prompt_length:
        return 0
    usable = len(sequence.tokens) - 1
    return usable if usable >= MIN_AWAITED_TOKENS else 0


def _packed(sequence: LiveSequence) -> bytes:
    """Its known tokens behind what stands for its adapter and salt."""
    request, tokens = sequence.live.request, sequence.tokens
    ids = tokens if isinstance(tokens, array) else array("I", tokens)
    if not (request.adapter or request.salt):
        return bytes(_SPACE_BYTES) + ids.tobytes()
    space = blake2b(request.salt, key=request.adapter[:64], digest_size=_SPACE_BYTES)
    return space.digest() + ids.tobytes()


def _shared(packed: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    return max(0, common(packed, other) - _SPACE_BYTES // ID_BYTES)
