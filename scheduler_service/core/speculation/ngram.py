"""Drafts from the sequence itself: what followed the longest earlier occurrence of its last tokens.

Prompt lookup (Yang et al., "Inference with Reference", arXiv:2304.04487; Saxena, "Prompt Lookup
Decoding", 2023), but incremental, and with the longest match instead of one of a fixed length.
"""

from __future__ import annotations

from array import array

MIN_MATCH = 2  # tokens: the n-grams that are indexed
SEARCH_MATCH = 32  # tokens: a search does not tell longer matches apart
SEARCH_CANDIDATES = 8  # most recent occurrences that a search looks at
UPDATE_BUDGET = 512  # tokens indexed by one update
LAZY = 32  # tokens that follow the match until they are indexed
SPARSE_STRIDE = 8  # of tokens that are indexed sparsely, one pair of this number is


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
    def lag(self) -> int:
        """Tokens that are not indexed yet."""
        return len(self._tokens) + 1 - len(self._earlier)

    def update(self, budget: int = UPDATE_BUDGET, stride: int = 1) -> int:
        """Follow the appended tokens, and index at most `budget` tokens; returns how many were indexed.

        stride: 1, or SPARSE_STRIDE, which indexes one pair of that many, at a fraction of the cost. A later
        repetition of these tokens is then found up to stride - 1 tokens later, and only if it is longer.

        A long prompt is indexed over several updates, oldest first; until then matches are found in the
        part that is. New tokens that follow the match are indexed LAZY at a time: nothing is searched
        before they end.
        """
        tokens = self._tokens
        known = len(tokens)
        first, length = self._followed_to, self.match_length
        self._followed_to = known
        self.scored_from = length
        self.followed, self.broke = 0, False
        if length and first < known:
            match = self.match_end
            came = known - first
            if tokens[first] != tokens[match]:
                self.broke, length = True, 0
            elif came == 1 or tokens[first:] == tokens[match : match + came]:
                self.followed = came
                self.match_end = match + came
                self.match_length = length + came
                if known - len(self._earlier) < LAZY:
                    return 0
            else:
                followed = 1
                while tokens[first + followed] == tokens[match + followed]:
                    followed += 1
                self.followed, self.broke, length = followed, True, 0
        earlier, latest = self._earlier, self._latest
        if known == len(earlier) > 1:  # as mostly: by one token
            pair = tokens[-2] << 32 | tokens[-1]
            last = latest.get(pair, 0)
            earlier.append(last)
            latest[pair] = known
            indexed = 1
        else:
            indexed = self._index(known, budget, stride)
            last = self._last(known)
        if not length:
            self.match_length = self.match_end = 0
            if stride > 1:
                self._search_back(known)
            elif last:
                self._search(known, last)
        return indexed

    def _index(self, known: int, budget: int, stride: int) -> int:
        """Index up to `budget` more tokens, every `stride`-th pair of them; returns how many tokens were."""
        tokens, earlier, latest = self._tokens, self._earlier, self._latest
        begin = len(earlier)
        end = min(known + 1, begin + budget)
        if stride > 1:
            earlier.frombytes(bytes(earlier.itemsize * (end - begin)))
            for position in range(max(MIN_MATCH, -(-begin // stride) * stride), end, stride):
                pair = tokens[position - 2] << 32 | tokens[position - 1]
                last = latest.setdefault(pair, position)
                if last != position:
                    earlier[position] = last
                    latest[pair] = position
            return end - begin
        before = tokens[begin - 2] if begin > 1 else -1
        for position, token in enumerate(tokens[begin - 1 : end - 1], begin):
            pair = before << 32 | token
            earlier.append(latest.get(pair, 0))
            latest[pair] = position
            before = token
        return end - begin

    def _last(self, known: int) -> int:
        """The position after the last indexed occurrence of the last pair before itself; 0: none."""
        if known < len(self._earlier):
            return self._earlier[known]
        tokens = self._tokens
        return self._latest.get(tokens[-2] << 32 | tokens[-1], 0) if known >= MIN_MATCH else 0

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

    def _search_back(self, known: int) -> None:
        """Search for a match of the last tokens by each of the last SPARSE_STRIDE pairs.

        Where a repetition was indexed sparsely, one of these pairs is in the index.
        """
        tokens, latest = self._tokens, self._latest
        for back in range(min(SPARSE_STRIDE, known - 1)):
            end = latest.get(tokens[known - back - 2] << 32 | tokens[known - back - 1], 0)
            while end >= known - back:  # the pair itself, or one after it
                end = self._earlier[end]
            if end:
                self._search(known, end, back)
                if self.match_length:
                    return

    def _search(self, known: int, end: int, back: int = 0) -> None:
        """Set `match_length` and `match_end` to the longest match of the last tokens; 0: there is none.

        Looks at up to SEARCH_CANDIDATES earlier occurrences of a pair, from the one that ends at `end`
        backwards. The pair ends `back` tokens before the last token of the sequence.
        """
        tokens, earlier = self._tokens, self._earlier
        best = best_end = 0
        candidates = SEARCH_CANDIDATES
        while end and candidates:
            candidates -= 1
            at = end + back
            if not best or (at > best and tokens[at - best - 1] == tokens[known - best - 1]):
                most = at if at < SEARCH_MATCH else SEARCH_MATCH
                length = 0 if back else MIN_MATCH
                while length < most and tokens[at - length - 1] == tokens[known - length - 1]:
                    length += 1
                if length > best and length >= MIN_MATCH:
                    best, best_end = length, at
                    if length == SEARCH_MATCH:
                        break
            end = earlier[end]
        self.match_length, self.match_end = best, best_end
