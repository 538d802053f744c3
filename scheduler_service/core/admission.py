"""Which requests are queued and which are started: bounds per identity, and deadlines that can be met.

The queue's bounds are shared by the identities that have something queued, by their weights: one that is
alone may use all of it. What an identity had queued before others came stays, so there may be more than the
bound, but never more than twice as much.

A request with a deadline is refused when its predicted first token is late, or, while requests wait for each
other, its predicted end (`forecast.py`). Its tokens are expected at the pace that a step has with all
places taken, or, if that is too slow for it, at the one that leaves QUEUE_SHARE of its time for the
queue: steps are kept short enough for that (`may_grow`). So what is started has time left, and a queue of
requests that are all nearly late, served by a small batch, does not come about.

How long completions are is only learned from requests that were taken. So that a wrong prediction does not
last, an identity that has nothing live may have a trial now and then: a request of which only the first
token has to be in time. Few of those that run are trials.
"""

from __future__ import annotations

import enum
from itertools import islice

from scheduler_service.core.account import Account
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import NoRoom, QuotaUsed, TooLate
from scheduler_service.core.forecast import Forecast
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.sequence_pool import SequencePool

QUEUE_SHARE = 0.2
"""Largest part of its time until the deadline that a request may spend in the queue if steps are slow."""
CAUTION = 1.2
"""A request is refused if this factor times its predicted time does not fit before its deadline."""
MARGIN = 1.05
"""Factor on the predicted time of the output."""
MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
STEEP = 1.4
"""Requests are held back for others' deadlines only if a step takes at least this factor longer than a step
with half the rows."""
TRIAL_INTERVAL = 10.0
"""Between two trials of an identity whose lengths are known, in times until the deadline."""
TRIAL_PLACES = 16
"""At most one of this number of running sequences is a trial, and at least one trial is allowed."""
SURPLUS_TOKENS = 64
"""Prompt tokens that identities above their share may start in one step, beside others."""
SAMPLE = 64
"""Identities that are looked at, at most, to predict a wait."""


class Start(enum.Enum):
    """Whether a request whose turn has come is started."""

    NOW = enum.auto()
    OTHERS_SHARE = enum.auto()  # not in this step, which is shared with other identities
    DEADLINES = enum.auto()  # not yet: running requests would miss their deadlines
    NEVER = enum.auto()  # it can't meet its own any more


class Admission:
    """Counts the queued requests, and decides which are taken and which are started."""

    def __init__(self, config: CoreConfig, pool: SequencePool, forecast: Forecast) -> None:
        self._config = config
        self._pool = pool
        self._forecast = forecast
        self._queued: dict[str, Account] = {}  # those with something queued
        self._weights: dict[str, float] = {}  # theirs, when they came
        self._weight = 0.0  # the sum of these
        self.requests = 0  # not started yet
        self.tokens = 0  # of their prompts
        self.trials = 0  # live requests that are trials
        self._plan_at = 0.0  # the step being made, while several identities are active
        self._started_tokens = 0  # in it, of those that hold more than their share
        self._started_fairly = False  # in it, one of those that hold less

    # -- the queue -------------------------------------------------------------------------------

    def queue(self, live: LiveRequest) -> None:
        """Count a request that was taken."""
        account, tokens = live.account, live.request.input_tokens
        if not account.queued_requests:
            self._queued[account.identity] = account
            self._weights[account.identity] = account.weight
            self._weight += account.weight
        account.taken_at = live.added_at
        self.trials += live.is_trial
        account.queued_requests += 1
        account.queued_tokens += tokens
        self.requests += 1
        self.tokens += tokens

    def unqueue(self, live: LiveRequest, now: float) -> None:
        """Count out a request that was started, or that has ended before its start."""
        account, tokens = live.account, live.request.input_tokens
        account.queued_requests -= 1
        account.queued_tokens -= tokens
        if not account.queued_requests:
            del self._queued[account.identity]
            weight = self._weights.pop(account.identity)
            self._weight = self._weight - weight if self._queued else 0.0
        self.requests -= 1
        self.tokens -= tokens
        if live.started:
            self._forecast.started(now, self.requests)
        elif not self.requests:
            self._forecast.interrupted()

    def ended(self, live: LiveRequest, now: float) -> None:
        """Count out a request that has ended, well or badly."""
        self.trials -= live.is_trial
        if not live.started:
            self.unqueue(live, now)

    def wait_s(self, identity: str, weight: float, max_sequences: int = 0) -> float:
        """Predicted seconds until a request that arrives now is started.

        `max_sequences`: how many run at once; 0: unknown.
        """
        if self._starts_at_once(identity, weight, max_sequences):
            return 0.0
        pool, forecast, running = self._pool, self._forecast, len(self._pool.running)
        if not self.requests:
            return forecast.wait_s(0)  # the next place that comes free
        places = max_sequences or running or 1
        account, total_weight = self._queued.get(identity), pool.queue.weight_with(identity, weight)
        looked_at = list(islice(pool.queue.active, SAMPLE))
        ahead, held = forecast.contention(account, weight, looked_at, places / total_weight)
        unseen = len(pool.queue.active) / len(looked_at)
        ahead, held = unseen * ahead, unseen * held
        if account is not None:
            ahead += account.queued_requests * forecast.size(account)
        if not running:  # all queued requests came since the last step, and all places are free
            ahead -= places
        return forecast.wait_s(ahead) / max(1 - held / places, weight / total_weight)

    def predicted_wait_s(self, identity: str, weight: float, max_sequences: int) -> float | None:
        """As `wait_s`; None where what was seen does not tell how long it is."""
        is_known = self._forecast.knows(self._queued.get(identity))
        if not is_known and not self._starts_at_once(identity, weight, max_sequences):
            return None
        return self.wait_s(identity, weight, max_sequences)

    def _starts_at_once(self, identity: str, weight: float, max_sequences: int) -> bool:
        """A place is free for it, or another identity has to give it one."""
        running = len(self._pool.running)
        if not self.requests and (not max_sequences or running < max_sequences):
            return True
        return self._pool.queue.is_below_share(identity, weight, running)

    # -- arrival --------------------------------------------------------------------------------

    def check_room(self, identity: str, weight: float, prompt_tokens: int) -> None:
        """Raise NoRoom or QuotaUsed if there is no room for a request with `prompt_tokens`."""
        config, account = self._config, self._queued.get(identity)
        requests, tokens = (account.queued_requests, account.queued_tokens) if account else (0, 0)
        share, most, most_tokens = 1.0, config.max_queued_requests, config.max_queued_tokens
        if len(self._queued) > (account is not None):
            share = weight / (self._weight + (0.0 if account else weight))
        allowed = max(1, min(int(share * most), config.max_queued_requests_per_identity or most))
        if requests >= allowed:
            raise self._used(identity, weight, "requests", requests, allowed, most)
        if requests and tokens + prompt_tokens > (allowed := int(share * most_tokens)):
            raise self._used(identity, weight, "tokens", tokens, allowed, most_tokens)
        if self.requests >= 2 * most:
            wait_s = self.retry_after_s(identity, weight)
            raise NoRoom(f"{self.requests} requests are queued", wait_s, "", "queued requests")
        if self.tokens + prompt_tokens > 2 * most_tokens:
            wait_s = self.retry_after_s(identity, weight)
            raise NoRoom(f"{self.tokens} tokens are queued", wait_s, "", "queued tokens")

    def _used(self, identity: str, weight: float, unit: str, queued: int, allowed: int, most: int) -> NoRoom:
        kind = NoRoom if allowed == most else QuotaUsed
        whose = f"{identity}: " if identity else ""
        sharing = f" while {len(self._queued)} identities wait" if len(self._queued) > 1 else ""
        message = f"{whose}{queued} {unit} are queued; at most {allowed} may be{sharing}"
        return kind(message, self.retry_after_s(identity, weight), identity, f"queued {unit}")

    def check_deadline(
        self,
        identity: str,
        weight: float,
        prompt_tokens: int,
        deadline: float | None,
        max_tokens: int | None,
        limits: JointLimits,
        now: float,
    ) -> bool:
        """Raise TooLate if such a request can't meet its deadline, as far as is known.

        True if it is to be a trial: it would be refused otherwise.
        """
        forecast, running = self._forecast, len(self._pool.running)
        if deadline is None or not forecast.step_s or not (running or self.requests):
            return False  # on an idle executor it is tried
        wait_s = self.wait_s(identity, weight, limits.max_sequences)
        first_at = now + wait_s + self._prompt_s(prompt_tokens, limits)
        late, what = first_at, "first token"
        length = forecast.length(self._pool.queue.account(identity), max_tokens)
        if length is not None and (self.requests or running >= limits.max_sequences):
            kept_short = (1 - QUEUE_SHARE) * (deadline - now) / (length * MARGIN * CAUTION)
            pace_s = max(forecast.pace_s(running), min(kept_short, forecast.pace_s(limits.max_sequences)))
            late, what = first_at + (length - 1) * pace_s * MARGIN, "end"
        if now + (late - now) * CAUTION <= deadline:
            return False
        if now + (first_at - now) * CAUTION <= deadline and self._may_try(identity, deadline - now, now):
            return True
        whose, due_in, left = f"{identity}: " if identity else "", (late - now) * CAUTION, deadline - now
        message = f"{whose}the {what} may take {due_in:.2f} s, but the deadline is in {left:.2f} s"
        raise TooLate(message, _retry(wait_s), identity, "deadline")

    def _may_try(self, identity: str, left_s: float, now: float) -> bool:
        """Whether the identity may have a trial that is due in `left_s` seconds."""
        if self.trials >= max(1, len(self._pool.running) // TRIAL_PLACES):
            return False
        account = self._pool.queue.account(identity)
        if account is None or account.requests:
            return account is None
        return not account.lengths.suffice or now - account.taken_at >= TRIAL_INTERVAL * left_s

    def retry_after_s(self, identity: str, weight: float) -> float:
        """When a refused client may try again: when what is queued before it has been started."""
        return _retry(self.wait_s(identity, weight))

    def _prompt_s(self, tokens: int, limits: JointLimits) -> float:
        return -(-tokens // limits.chunk_tokens) * self._forecast.step_s

    # -- the start -------------------------------------------------------------------------------

    def max_pace_s(self, now: float) -> float:
        """The slowest pace (seconds per token) at which all but a few running requests meet their deadlines.

        inf if none of them has a deadline.
        """
        running = self._pool.running
        if not any(sequence.live.request.deadline is not None for sequence in running):
            return float("inf")
        return self._forecast.max_pace_s(running, now)

    def may_start(self, sequence: LiveSequence, limits: JointLimits, max_pace_s: float, now: float) -> Start:
        """Whether to start it: the running requests miss deadlines at a slower pace than `max_pace_s`."""
        forecast, live = self._forecast, sequence.live
        if self._pool.queue.contested and not self._fits_beside(sequence, limits, now):
            return Start.OTHERS_SHARE
        if live.request.deadline is None and max_pace_s == float("inf"):
            return Start.NOW
        pace_s = forecast.pace_s(len(self._pool.running) + 1)
        deadline = live.request.deadline
        # A request of which another completion has a cache goes on: this step may have a row of that one.
        if deadline is not None and not (live.emitted or any(one.cache_id for one in live.sequences)):
            late = now + self._prompt_s(len(sequence.tokens), limits)
            length = forecast.length(live.account, live.request.expected_tokens)
            if length is not None and not live.is_trial and self.requests > 1:
                late += (length - 1) * pace_s * MARGIN
            if late > deadline:
                return Start.NEVER
        if pace_s <= max_pace_s or pace_s < STEEP * forecast.pace_s(len(self._pool.running) // 2):
            return Start.NOW
        return Start.DEADLINES

    def _fits_beside(self, sequence: LiveSequence, limits: JointLimits, now: float) -> bool:
        """Whether the step may have this prompt too, for the sake of others' steps and first tokens.

        Identities that hold no more than their share of the places may start whatever fits; the others few
        prompt tokens a step, and none in a step that starts a request of an identity below its share.
        """
        if now != self._plan_at:
            self._plan_at, self._started_tokens, self._started_fairly = now, 0, False
        account, tokens = sequence.live.account, len(sequence.tokens)
        if account.running < self._pool.queue.share(account, limits.max_sequences):
            self._started_fairly = True
            return True
        if self._started_fairly or (self._started_tokens and self._started_tokens + tokens > SURPLUS_TOKENS):
            return False
        self._started_tokens += tokens
        return True

    def check_integrity(self, queued: list[LiveRequest]) -> None:
        """Compare with those that are live and not started. Raises AssertionError."""
        assert self.requests == len(queued), "queued requests are miscounted"
        assert self.tokens == sum(q.request.input_tokens for q in queued), "queued tokens are miscounted"
        counts: dict[str, int] = {}
        for live in queued:
            counts[live.request.identity] = counts.get(live.request.identity, 0) + 1
        assert counts == {name: a.queued_requests for name, a in self._queued.items()}, "an identity's queue"


def _retry(wait_s: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))
