"""When a request's first token and its end will come: the fitted step time, observed lengths, recent starts.

    first token = now + wait + steps of its prompt · s                   (s: recent step time)
    end         = first token + (L - 1) · pace(rows)
    pace(rows)  = s · m(rows) / m(rows now) / tokens per row and step    (m: the fitted model of step times)
    wait        = (requests ahead in fair order + 1) · interval of starts while others wait / part of places

L is the quantile `LENGTH_QUANTILE` of observed completions: the identity's own when it has had enough, else
that of all identities, never more than `max_tokens`. Before anything was seen, the prediction is "at once".

Of the requests ahead, each counts by the mean length of its identity's completions, in units of that of all:
an interval is what one of average length takes. The part of places is what the identities leave that have no
more than their share of them (`contention`).
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_service.core.account import Account
from scheduler_service.core.lengths import LENGTH_QUANTILE, MEDIAN, Lengths
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.speculation.step_time import StepTime, Work

ALL_LENGTHS = 128
"""Completions, of all identities, from which lengths are estimated."""
_SMOOTHING = 0.1  # weight of the newest step in a moving average
_STARTS = 64  # that the measured interval between them rests on
_CROWD = 10  # one of this number of running requests may miss its deadline for the others' sake
_LOST = 0.5  # a running request that would need less than this of the present pace is not waited for


class Forecast:
    """Learns from steps, starts and completions."""

    def __init__(self, step_time: StepTime) -> None:
        self._model = step_time
        self._lengths = Lengths(ALL_LENGTHS)
        self._latest: Account | None = None  # whose completion ended last
        self._alike = 0  # completions in a row that were its
        self.step_s = 0.0  # moving average
        self.step_rows = 0.0  # moving average, openings included
        # of a step, moving averages; while requests with deadlines or drafts are live
        self._rows = self._tokens = self._prompt = self._context = 0.0
        self._tokens_per_row = 1.0
        # starts while others waited, and the time that they took; both forget
        self._starts = 0.0
        self._starts_s = 0.0
        self._started_at: float | None = None  # last start; None if no request was queued after it
        self._took_over = False

    # -- what was seen ---------------------------------------------------------------------------

    def stepped(self, seconds: float, rows: int) -> None:
        """A step of `rows` rows took `seconds`."""
        weight = _SMOOTHING if self.step_rows else 1.0
        self.step_s += weight * (seconds - self.step_s)
        self.step_rows += weight * (rows - self.step_rows)

    def worked(self, work: Work, openings: int, emitted: int) -> None:
        """What the step computed; how many sequences it opened and tokens it brought."""
        rows = work.rows + openings
        if not rows:
            return
        weight = _SMOOTHING if self._rows else 1.0
        self._rows += weight * (rows - self._rows)
        self._tokens += weight * (work.tokens - self._tokens)
        self._prompt += weight * (work.prompt - self._prompt)
        self._context += weight * (work.context - self._context)
        self._tokens_per_row += _SMOOTHING * (emitted / rows - self._tokens_per_row)

    def started(self, now: float, waiting: int) -> None:
        """A request was started; `waiting` are still queued."""
        if self._started_at is None:
            self._took_over = False  # it took a free place
        elif now > self._started_at:
            self._took_over = True  # it took an ended request's place, as do all that start with it
            self._starts_s += now - self._started_at
        if self._took_over:
            keep = 1 - 1 / _STARTS
            self._starts = self._starts * keep + 1
            self._starts_s *= keep
        self._started_at = now if waiting else None

    def interrupted(self) -> None:
        """Leave the time until the next start out: no request is queued any more, or there is no executor."""
        self._started_at = None

    def ended(self, sequence: LiveSequence, *, cut_off: bool) -> None:
        """A completion ended or failed; `cut_off`: its deadline ended it.

        What it had then is only a lower bound: it counts as if half had been missing. A server on which
        all requests miss their deadlines thus finds out fast how long completions are, though it sees none.
        """
        if tokens := sequence.generated:
            if cut_off:
                tokens = min(2 * tokens, sequence.end_length - sequence.prompt_length)
            account = sequence.live.account
            self._lengths.observe(tokens)
            account.lengths.observe(tokens)
            self._alike = self._alike + 1 if account is self._latest else 1
            self._latest = account

    # -- what is to be expected ------------------------------------------------------------------

    def pace_s(self, rows: int) -> float:
        """Seconds per output token of one of `rows` sequences; 0 while nothing is known."""
        if not self._rows:  # no request had a deadline or drafts yet
            return self.step_s
        here = self._model.seconds(self._work(1.0))
        there = self._model.seconds(self._work(rows / self._rows))
        return self.step_s * there / here / max(1.0, self._tokens_per_row)

    def _work(self, times: float) -> Work:
        rows = max(1, round(self._rows * times))
        return Work(
            rows,
            max(rows, round(self._tokens * times)),
            round(self._context * times),
            prompt=round(self._prompt * times),
        )

    def length(self, account: Account | None, max_tokens: int | None) -> int | None:
        """Expected output tokens of a completion, at least 1; None if too few completions were seen."""
        lengths = self._of(account)
        expected = lengths.quantile(LENGTH_QUANTILE) if lengths.suffice else None
        if expected is None:
            return None
        return expected if max_tokens is None else min(expected, max_tokens)

    def _of(self, account: Account | None) -> Lengths:
        return account.lengths if account is not None and account.lengths.suffice else self._lengths

    def max_pace_s(self, running: Iterable[LiveSequence], now: float) -> float:
        """Seconds per token at which all but a few of the running requests meet their deadlines; inf: any.

        What they still have to generate is the median of completions longer than they are already. Those
        that would be late even if steps were far shorter than now are not counted: no room for them helps.
        """
        paces: list[float] = []
        count = 0
        lost = _LOST * self.step_s / max(1.0, self._tokens_per_row)
        for sequence in running:
            count += 1
            deadline = sequence.live.request.deadline
            if deadline is None:
                continue
            expected = self._of(sequence.live.account).quantile(MEDIAN, sequence.generated)
            if expected is None:
                continue
            left = min(expected - sequence.generated, sequence.end_length - len(sequence.tokens))
            if left > 0 and (pace := (deadline - now) / left) > lost:
                paces.append(pace)
        first = count // _CROWD
        return sorted(paces)[first] if first < len(paces) else float("inf")

    def _interval_s(self) -> float:
        """Between two starts while others wait: measured, else a completion's time, shared by all rows."""
        if self._starts:
            return self._starts_s / self._starts
        return (self._lengths.mean or 1) * self.step_s / max(1.0, self.step_rows * self._tokens_per_row)

    def knows(self, account: Account | None) -> bool:
        """What was seen tells how long a request of the account waits that is queued now."""
        if self._lengths.mean is None and not self._starts:
            return False
        return account is None or not account.queued_requests or account.taken > account.requests

    def contention(
        self, account: Account | None, weight: float, others: Iterable[Account], fair_places: float
    ) -> tuple[float, float]:
        """What stands before a request of this account that is queued now: of other identities.

        Returns the requests of theirs that are started before it, in requests of average length, and the
        places that it can't have. An identity with no more than its share of the places keeps what it has:
        its next requests follow at once. Of one with more, as many are started as get their turns meanwhile.
        fair_places: a share, for a weight of 1.
        """
        own = account.queued_requests if account is not None else 0
        rounds = (own + 1) * self.size(account) / weight
        ahead = held = 0.0
        for other in others:
            if other is account:
                continue
            asked = other.running + other.queued_requests
            if asked <= fair_places * other.weight:
                held += asked
            else:
                ahead += min(other.queued_requests * self.size(other), rounds * other.weight)
        return ahead, held

    def size(self, account: Account | None) -> float:
        """Mean length of the account's completions, in relation to that of all; 1 if it is not known."""
        own = None if account is None else account.lengths.mean
        are_all_its = account is self._latest and self._alike >= len(self._lengths)
        return own / self._lengths.mean if own and self._lengths.mean and not are_all_its else 1.0

    def wait_s(self, ahead: float) -> float:
        """Seconds until one starts that has `ahead` of average length before it; -1 or less: at once."""
        return max(0.0, ahead + 1) * self._interval_s()
