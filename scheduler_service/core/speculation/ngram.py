"""Drafts from the sequence itself: what followed the longest earlier occurrence of its last tokens.

Prompt lookup (Yang et al., "Inference with Reference", arXiv:2304.04487; Saxena, "Prompt Lookup
Decoding", 2023), but incremental, and with the longest match instead of one of a fixed length.
"""

from __future__ import annotations

from array import array

MIN_MATCH = 2  # tokens: the n-grams that are indexed
SEARCH_MATCH = 32  # tokens: a search does not tell longer matches apart
SEARCH_CANDIDATES = 24  # most recent occurrences that a search looks at
UPDATE_BUDGET = 512  # tokens indexed by one update


class NgramIndex:
    """Finds the longest suffix of `tokens` that occurred before; of several, the most recent.

    `tokens` is the sequence's own list, prompt and output, which only ever grows at its end: it is not
    copied. After tokens were appended, `update` comes before anything else. An indexed token takes 105 bytes
    of memory where every pair is new, less where they recur.

    How: a dict maps every pair of adjacent tokens to the position after its last occurrence, and
    `_earlier` chains each such position to the one before it with the same pair. While the text goes on
    as the match did, the match stays the longest one there is, and grows: nothing is searched. Otherwise
    the chain of the last pair is searched: its SEARCH_CANDIDATES most recent occurrences, for matches of
    up to SEARCH_MATCH tokens.

    match_length: tokens; 0 without a match. match_end: the position of what followed the match.
    scored_from, followed, broke: how the match before the last `update` did on the tokens that came. The
    first `followed` of them were what it predicted (the first of them at match length `scored_from`, the
    next at one more, and so on); `broke` tells whether one after them was not.
    """

    __slots__ = (
        "_earlier",
        "_followed_to",
        "_latest",
        "_tokens",
        "broke",
        "followed",
        "match_end",
        "match_length",
        "scored_from",
    )

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._latest: dict[int, int] = {}  # pair -> the position after its last occurrence
        self._earlier = array("i", [0])  # position -> the one before it with the same pair; 0: none
        self._followed_to = 0  # tokens that `update` has compared with the match
        self.match_end = 0
        self.match_length = 0
        self.scored_from = 0
        self.followed = 0
        self.broke = False

    @property
    def behind(self) -> int:
        """Tokens that are not indexed yet."""
        return len(self._tokens) + 1 - len(self._earlier)

    def update(self, budget: int = UPDATE_BUDGET) -> int:
        """Follow what was appended, and index at most `budget` tokens; returns how many were.

        A long prompt is indexed over several updates, oldest first; until then matches are found in the
        part that is.
        """
        tokens, earlier, latest = self._tokens, self._earlier, self._latest
        known = len(tokens)
        begin = len(earlier)
        end = min(known + 1, begin + budget)
        before = tokens[begin - 2] if begin > 1 else -1
        for position in range(begin, end):
            token = tokens[position - 1]
            pair = before << 32 | token
            earlier.append(latest.get(pair, 0))
            latest[pair] = position
            before = token

        self.scored_from = length = self.match_length
        if length:
            match = self.match_end
            at = first = self._followed_to
            while at < known and tokens[at] == tokens[match]:
                at += 1
                match += 1
            self.followed = at - first
            self.broke = at < known
            if at == known:
                self.match_end = match
                self.match_length = length + at - first
        else:
            self.followed = 0
            self.broke = False
        self._followed_to = known
        if (self.broke or not length) and known >= MIN_MATCH:
            self._search(known)
        return end - begin

    def propose(self, count: int) -> list[int]:
        """`count` drafts: what followed the match. Empty without a match.

        Where the match reaches to the end of the sequence this is a repetition, and goes on as one.
        """
        if not self.match_length:
            return []
        drafts = self._tokens[self.match_end : self.match_end + count]
        while len(drafts) < count:
            drafts += drafts[: count - len(drafts)]
        return drafts

    def _search(self, known: int) -> None:
        """Find the longest match of the last tokens along the chain of the last two."""
        tokens, earlier = self._tokens, self._earlier
        if known < len(earlier):
            end = earlier[known]
        else:  # the last pair is not indexed yet
            end = self._latest.get(tokens[known - 2] << 32 | tokens[known - 1], 0)
        best = best_end = 0
        candidates = SEARCH_CANDIDATES
        while end and candidates:
            candidates -= 1
            most = min(end, SEARCH_MATCH)
            if most > best and (not best or tokens[end - best - 1] == tokens[known - best - 1]):
                length = MIN_MATCH
                while length < most and tokens[end - length - 1] == tokens[known - length - 1]:
                    length += 1
                if length > best:
                    best, best_end = length, end
                    if length == SEARCH_MATCH:
                        break
            end = earlier[end]
        self.match_length, self.match_end = best, best_end
