"""One sequence's KV cache on the draft executor: how many of the sequence's known tokens it holds.

The cache follows the target without a message. After k drafts on top of n + 1 known tokens its KV length
is n + k. Whatever the verification accepts, the longest common prefix of the cached tokens and of the tokens
known by then is kept; the rest is truncated in the next step that uses the cache, and that step's row feeds
all known tokens after the prefix:

    after full acceptance    2 tokens: the last draft, and the token sampled after it
    after a rejection        1 token: the one that was sampled instead
    after plain decoding     as many tokens as were decoded meanwhile; a late answer counts as this
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_service.core.sequence import LiveSequence


@dataclass(slots=True, eq=False)
class DraftCache:
    """A cache on the draft executor that belongs to one target cache and is released with it."""

    sequence: LiveSequence
    target_id: int  # cache id on the target
    cache_id: int  # cache id on the draft executor
    given: int  # known tokens in its opening; those beyond `kv` are pending there
    kv: int = 0  # tokens
    shared: int = 0  # leading tokens of `kv` that are known tokens of the sequence
    sampled: list[int] = field(default_factory=list)  # drafts after those; all but the last are in the KV

    @property
    def valid(self) -> int:
        """Known tokens that the KV holds, at most all but the last: a row feeds at least one token."""
        tokens, valid = self.sequence.tokens, self.shared
        most = len(tokens) - 1
        for draft in self.sampled[: self.kv - valid]:
            if valid >= most or tokens[valid] != draft:
                break
            valid += 1
        return min(valid, most)

    @property
    def lag(self) -> int:
        """Known tokens that its next row has to feed, at least 1."""
        return len(self.sequence.tokens) - self.valid
