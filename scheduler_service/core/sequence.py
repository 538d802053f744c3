"""A live request and its sequences: their tokens, how many of them are computed, and counts for the usage."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from scheduler_service.core.account import Account
from scheduler_service.core.evaluation import EvaluationInput
from scheduler_service.core.events import CompletionUsage, EndReason
from scheduler_service.core.open_drafts import OpenDrafts
from scheduler_service.core.request import Request, SamplingSettings, index_seed
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.states import SequenceState, Trigger, after
from scheduler_service.core.step import RowMode
from scheduler_service.core.waiting.course import Stage
from scheduler_service.core.waiting.reasons import WaitReason, WaitTimes
from scheduler_service.core.waiting.wait import Wait

Ending = tuple[EndReason, int | None]
"""Why a completion finishes, and the id of the end or stop token that finishes it; None for other reasons."""

Key = tuple[int, int, float, int, int]
"""Sorts sequences: by rank of the account (the identity that became active first), then priority descending,
arrival, serial of the request, index. `FairQueue` decides which identity is served next."""


class LiveRequest:
    """A request that was taken, and its n sequences. It is live until all of them have ended."""

    __slots__ = (
        "account",
        "added_at",
        "cached",
        "emitted",
        "is_trial",
        "predicted_wait_s",
        "request",
        "sequences",
        "serial",
        "started",
        "stop_token_ids",
        "stops",
        "to_start",
        "waits_before",
    )

    def __init__(self, request: Request, account: Account, serial: int, max_tokens: int, now: float) -> None:
        self.request = request
        self.account = account
        self.serial = serial  # rises by one with each request
        self.added_at = now
        phases = request.phases or ((WaitReason.TOKENIZING, request.arrival),)
        ends = [*(began_at for _, began_at in phases[1:]), now]
        # What it waited for before it was queued, in this order.
        self.waits_before: WaitTimes = tuple(
            [(reason, end - at) for (reason, at), end in zip(phases, ends, strict=True)]
        )
        self.started = False  # one of its sequences was in a step: it no longer counts as queued
        self.emitted = False  # tokens were emitted
        self.cached: int | None = None  # prompt tokens found in the prefix cache; None: nothing opened yet
        self.is_trial = False  # taken although its end was predicted to be late
        # From its adding to its start, as predicted at its adding; None: what was seen did not tell.
        self.predicted_wait_s: float | None = 0.0
        self.stops = request.eos_token_ids | request.stop_token_ids
        self.stop_token_ids = tuple(sorted(self.stops))  # as openings and forks carry them
        # Sequences that must have had a cache before the request no longer counts as queued.
        self.to_start = 1
        if request.evaluation is not None:
            self.sequences = [
                LiveSequence(self, i, _array(one.tokens), 0, one)
                for i, one in enumerate(request.evaluation.inputs)
            ]
            self.to_start = len(self.sequences)
            leaders = request.evaluation.leaders()
            for sequence, shared in zip(self.sequences, leaders, strict=True):
                if shared is not None:
                    sequence.follow(self.sequences[shared.leader], shared.tokens)
        else:
            prompt = _array(request.prompt)
            self.sequences = [LiveSequence(self, i, prompt, max_tokens) for i in range(request.n)]
            for sequence in self.sequences[1:]:
                sequence.follow(self.sequences[0])
        for continued in request.continued:
            self.sequences[continued.index].continue_from(continued.ids)

    @property
    def ended(self) -> bool:
        """All its sequences have ended."""
        return all(s.state is SequenceState.ENDED for s in self.sequences)

    def holds_room_for(self, request: Request) -> bool:
        """Whether this request is queued, and `request` needs no more of the queue's bounds than it does."""
        mine = self.request
        fits = mine.identity == request.identity and mine.input_tokens >= request.input_tokens
        return fits and not self.started

    def set_max_tokens(self, max_tokens: int) -> None:
        """Set the maximum of output tokens of each completion, after another executor became ready.

        Not of an evaluation, which has no output.
        """
        for sequence in self.sequences:
            sequence.end_length = sequence.prompt_length + max_tokens


def score_bytes(k: int) -> int:
    """Maximum size of a token's score in an executor's answer, with `k` alternatives (its contract)."""
    return 4 + 9 * k


def _array(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) else array("I", tokens)


class LiveSequence:
    """One completion, or one input of an evaluation.

    Its *known* tokens are prompt and output; the KV cache holds the first `kv` of them.
    """

    __slots__ = (
        "awaits_drafts",
        "behind_refused",
        "cache_id",
        "cached",
        "charged",
        "draft_state",
        "end_kv",
        "end_length",
        "evictions",
        "expected_hit",
        "first_token_at",
        "followers",
        "in_flight",
        "index",
        "input_length",
        "is_behind",
        "is_predictable",
        "key",
        "kv",
        "leader",
        "live",
        "losses",
        "lost_at",
        "mode",
        "next_score",
        "open_drafts",
        "prompt_length",
        "refusals",
        "sampling",
        "shared_tokens",
        "started_at",
        "state",
        "tail_shared",
        "tokens",
        "wait",
    )

    def __init__(
        self,
        live: LiveRequest,
        index: int,
        prompt: array[int],
        max_tokens: int,
        evaluated: EvaluationInput | None = None,
    ) -> None:
        request = live.request
        self.live = live
        self.index = index
        self.key: Key = (live.account.rank, -request.priority, request.arrival, live.serial, index)
        self.sampling = request.sampling.with_seed(index_seed(request.sampling.seed, index))
        self.tokens: list[int] | array[int] = prompt  # a list of its own from its first opening on
        self.prompt_length = len(prompt)
        self.input_length = self.prompt_length  # prompt, and output that was produced elsewhere
        self.end_length = self.prompt_length + max_tokens  # known tokens at which it ends
        self.state = SequenceState.QUEUED
        self.leader: LiveSequence | None = None  # it is held until this one has computed their common prefix
        self.followers: list[LiveSequence] = []  # those that are held until then
        self.expected_hit = 0  # tokens that its opening is likely to find in the prefix cache
        # scores of the prompt
        self.next_score = self.prompt_length  # tokens before this position have theirs, or need none
        self.mode = RowMode.SAMPLE
        self.end_kv = 0  # KV length at which an evaluation ends; 0: it is none
        if evaluated is not None:
            is_scored = evaluated.scored_from > 0
            self.next_score = evaluated.scored_from or self.prompt_length
            self.mode = RowMode.NONE if is_scored else RowMode.HIDDEN
            self.end_kv = self.prompt_length - is_scored
        elif index == 0 and request.prompt_logprobs is not None and not request.continued:
            self.next_score = min(1, self.prompt_length)
        # the cache
        self.cache_id = 0  # 0: none
        self.kv = 0
        self.in_flight = 0  # unanswered rows
        self.open_drafts: OpenDrafts | None = None  # of these; None: it has had none yet
        self.is_predictable = False  # each of them decodes or verifies: it adds a token, unless it fails
        self.behind_refused = 0  # unanswered rows that were sent after a refused one
        self.shared_tokens = 0  # first tokens, on pages that other caches may share: prefix hit, or fork
        self.tail_shared = False  # its last page is shared with a fork: the next write copies it
        self.is_behind = False  # its last opening was refused: its grammar has not read its output yet
        # speculation
        self.draft_state: DraftState | None = None  # None: off
        self.awaits_drafts = False  # of the draft executor: it gets no row on the target meanwhile
        # faults
        self.losses = 0  # executors lost with a row of it in flight, since its last new token
        self.lost_at = 0  # known tokens at the last of these losses
        self.refusals = 0  # answers in a row by which its cache is not as recorded here
        self.charged = 0  # virtual tokens charged to its account
        self.cached: int | None = None  # tokens that its first cache began with: not charged
        # for its usage
        self.wait = Wait()
        self.evictions = 0
        self.started_at: float | None = None
        self.first_token_at: float | None = None

    # -- changes ---------------------------------------------------------------------------------

    def happen(self, trigger: Trigger) -> None:
        """Change the state as the table says. Raises IllegalEvent."""
        self.state = after(self.state, trigger)

    def continue_from(self, ids: tuple[int, ...]) -> None:
        """Append output tokens that another scheduler has emitted."""
        self.tokens = array("I", [*self.tokens, *ids])  # the prompt's own array is shared
        self.input_length += len(ids)

    def follow(self, leader: LiveSequence, expected_hit: int = 0) -> None:
        """Hold it until the leader has computed what they have in common. Only before it is queued."""
        self.state = SequenceState.HELD
        self.leader, self.expected_hit = leader, expected_hit
        leader.followers.append(self)

    def await_beginning(self, leader: LiveSequence, tokens: int) -> None:
        """Hold it, which is queued, until the leader has computed `tokens` that both begin with."""
        self.happen(Trigger.HOLD)
        self.leader, self.expected_hit = leader, tokens
        leader.followers.append(self)

    def unhold(self) -> None:
        """It is to be queued. A leader of another request is forgotten: chains of them would never end."""
        self.happen(Trigger.QUEUE)
        if self.leader is not None and self.leader.live is not self.live:
            self.leader = None

    def needs(self, leader: LiveSequence) -> bool:
        """Whether it still has to wait for what the leader computes."""
        if leader.state in (SequenceState.RUNNING, SequenceState.ENDED):
            return False
        return leader.live is self.live or leader.cache_id > 0

    def open(self, cache_id: int, now: float) -> None:
        """Give it a cache, which the next step opens. Raises IllegalEvent."""
        self.happen(Trigger.OPEN)
        self.cache_id = cache_id
        if not (isinstance(self.tokens, list) or self.end_kv):
            self.tokens = self.tokens.tolist()
        if self.started_at is None:
            self.started_at = now
            self.live.to_start -= 1

    def fork(self, source: LiveSequence, length: int, *, shares_tail: bool) -> None:
        """Record that its new cache is a copy of the first `length` tokens of the source's cache.

        shares_tail: the source too writes to the last shared page next; the first of the writes copies it.
        """
        self.kv = self.shared_tokens = length
        source.tail_shared |= shares_tail

    def send_decode(self) -> None:
        """Count a sent row that adds exactly one token, unless it fails."""
        self.in_flight += 1
        self.is_predictable = True

    def send_verification(self, drafts: tuple[int, ...]) -> None:
        """Count a sent row that adds a token, unless it fails, and one for each draft that is accepted."""
        if self.open_drafts is None:
            self.open_drafts = OpenDrafts()
        self.open_drafts.send(self.in_flight, drafts)
        self.send_decode()

    def send_row(self) -> None:
        """Count a sent row of which only its answer tells whether it adds a token."""
        self.in_flight += 1
        self.is_predictable = False

    def _answered(self) -> None:
        """Count the answer to the oldest unanswered row."""
        self.in_flight -= 1
        if self.open_drafts is not None:
            self.open_drafts.answer()
        if self.behind_refused:
            self.behind_refused -= 1

    def refuse_row(self) -> bool:
        """Count a refused row; returns whether it was sent after one that was refused too."""
        is_behind = self.behind_refused > 0
        self._answered()
        self.behind_refused = self.in_flight
        self.is_predictable = False
        return is_behind

    def advance(self, kv_length: int) -> None:
        """Take a row's answer that computed known tokens, but not all of them. Raises IllegalEvent."""
        self.happen(Trigger.CHUNK)
        self._answered()
        self.kv = kv_length

    def score(self, end: int) -> None:
        """The prompt's tokens before position `end` have their scores."""
        self.next_score = end

    def prefill(self, now: float) -> None:
        """Note that all its known tokens are computed, so that it decodes now. Raises IllegalEvent."""
        self.happen(Trigger.SAMPLE)
        self.wait.course.turn(Stage.DECODE, now)
        if self.first_token_at is None:
            self.first_token_at = now

    def extend(self, tokens: list[int], kv_length: int) -> Ending | None:
        """Append a row's sampled tokens, up to one that ends the sequence; returns why it ends, or None."""
        if self.open_drafts is None and not self.behind_refused:
            self.in_flight -= 1
        else:
            self._answered()
        self.kv = kv_length
        self.tail_shared = False
        self.refusals = 0
        known, stops = self.tokens, self.live.stops
        for token in tokens:
            known.append(token)
            if (token in stops or len(known) >= self.end_length) and (ending := self.verdict()):
                return ending
        return None

    def note_cache(self, tokens: int) -> int:
        """Note the tokens that a new cache began with, by a prefix hit or as a fork.

        Returns how many of the prompt were in the prefix cache, if this is the request's first cache, else
        0: a request's prompt counts once, however many completions share it. Each input has its own prompt.
        """
        self.shared_tokens = tokens
        self.is_behind = False
        is_first = self.cached is None
        if self.cached is None:
            self.cached = tokens
        if self.end_kv:
            return tokens if is_first else 0
        if self.live.cached is not None:
            return 0
        self.live.cached = min(tokens, self.prompt_length)
        return self.live.cached

    def drop_cache(self) -> None:
        """Forget its cache, and what was true of that cache alone."""
        self.cache_id = 0
        self.kv = 0
        self.shared_tokens = 0
        self.tail_shared = False
        self.in_flight = self.behind_refused = 0
        self.is_predictable = False
        self.awaits_drafts = False
        self.open_drafts = None

    def wait_for_drafts(self) -> None:
        """The draft executor makes drafts for it: it gets no row until they have come."""
        self.awaits_drafts = True

    def stop_waiting_for_drafts(self) -> None:
        """It may have a row again, with drafts or without."""
        self.awaits_drafts = False

    def lose_executor(self) -> int:
        """Count an executor that was lost with a row of it; returns the losses since its last new token."""
        self.losses += 1
        self.lost_at = len(self.tokens)
        return self.losses

    def forget_losses(self) -> None:
        """It has a new token: start counting anew."""
        self.losses = 0

    def fall_behind(self) -> None:
        """Its opening was refused, and is to be tried again: its grammar has not read its output yet."""
        self.is_behind = True

    def count_eviction(self) -> None:
        """Count the loss of its cache to a preemption or with an executor, for its usage."""
        self.evictions += 1

    def count_refusal(self) -> int:
        """Count an answer by which its cache is not as recorded here; returns the number of them in a row."""
        self.refusals += 1
        return self.refusals

    @property
    def got_on(self) -> bool:
        """It has tokens that it did not have at the last counted loss."""
        return self.losses > 0 and len(self.tokens) > self.lost_at

    # -- questions -------------------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        """Tokens that the unanswered rows add at most."""
        return self.in_flight if self.open_drafts is None else self.in_flight + self.open_drafts.count

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def to_compute(self) -> int:
        """Known tokens that have to be computed: for scores all but the last."""
        return (self.end_kv or len(self.tokens)) - self.kv

    @property
    def score_bytes(self) -> int:
        """Maximum size, in an executor's answer, of the scores of one token that is fed; 0: it needs none."""
        if self.next_score >= self.prompt_length:
            return 0
        return score_bytes(self.opening_sampling.logprobs or 0)

    @property
    def opening_sampling(self) -> SamplingSettings:
        """The sampling of its next opening: its alternatives are for scores of the prompt as well."""
        k = self.live.request.prompt_logprobs
        if k is None or self.next_score >= self.prompt_length:
            return self.sampling
        return replace(self.sampling, logprobs=max(k, self.sampling.logprobs or 0))

    @property
    def source(self) -> LiveSequence | None:
        """The first completion, if this one can be its fork: it decodes, and this one has no output yet."""
        first = self.leader
        if first is None or first.state is not SequenceState.RUNNING or len(self.tokens) > self.prompt_length:
            return None
        return first

    def verdict(self) -> Ending | None:
        """Why the sequence ends with its last token; None: it goes on.

        An end or stop token among the first `min_tokens` output tokens does not end it; executors mask them.
        """
        last = self.tokens[-1]
        if last in self.live.stops and self.generated > self.live.request.min_tokens:
            is_eos = last in self.live.request.eos_token_ids
            return (EndReason.EOS if is_eos else EndReason.STOP_TOKEN), last
        if len(self.tokens) >= self.end_length:
            return EndReason.LENGTH, None
        return None

    def usage(self, now: float) -> CompletionUsage:
        """What the completion or the evaluation took until `now`."""
        arrival, drafts = self.live.request.arrival, self.draft_state
        drafted = drafts.drafted_by_position if drafts else ()
        accepted = drafts.accepted_by_position if drafts else ()
        return CompletionUsage(
            prompt_tokens=self.prompt_length,
            cached_tokens=min(self.cached or 0, self.prompt_length),
            completion_tokens=self.generated,
            drafted_tokens=sum(drafted),
            accepted_tokens=sum(accepted),
            preemptions=self.evictions,
            queue_s=(now if self.started_at is None else self.started_at) - arrival,
            first_token_s=(now if self.first_token_at is None else self.first_token_at) - arrival,
            total_s=now - arrival,
            verifications=drafts.verifications if drafts else 0,
            drafted_by_position=drafted,
            accepted_by_position=accepted,
            grammar_drafted_tokens=drafts.grammar_drafted if drafts else 0,
            grammar_accepted_tokens=drafts.grammar_accepted if drafts else 0,
            queue_waits=self.wait.queued.times(),
            preempted_waits=self.wait.again.times() if self.wait.again is not None else (),
        )
