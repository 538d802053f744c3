"""One live request and its sequences: what is known, what is computed, how it went so far."""

from __future__ import annotations

from array import array

from scheduler_service.core.account import Account
from scheduler_service.core.events import CompletionUsage, EndReason
from scheduler_service.core.request import Request
from scheduler_service.core.seeds import index_seed
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.states import SequenceState, Trigger, after

Ending = tuple[EndReason, int | None]
"""Why a completion ends well, and the token id that does it, if one does."""

Key = tuple[int, int, float, int, int]
"""Sorts sequences by who goes first: identities by how long they have been active, then within one identity
priority descending, arrival, order of adding, index. Whose turn to be admitted it is, `FairQueue` decides."""


class LiveRequest:
    """A request that was taken and has not ended, and its n sequences."""

    __slots__ = (
        "account",
        "added_at",
        "emitted",
        "is_trial",
        "predicted_wait_s",
        "request",
        "sequences",
        "serial",
        "started",
        "stop_token_ids",
        "stops",
    )

    def __init__(self, request: Request, account: Account, serial: int, max_tokens: int, now: float) -> None:
        self.request = request
        self.account = account
        self.serial = serial  # rises with each request: the last word on who came first
        self.added_at = now
        self.started = False  # some step had it: it no longer counts as queued
        self.emitted = False
        self.is_trial = False  # taken however long it was expected to be
        self.predicted_wait_s = 0.0  # from its adding to its start, as predicted then
        self.stops = request.eos_token_ids | request.stop_token_ids
        self.stop_token_ids = tuple(sorted(self.stops))  # as executors take them
        prompt = request.prompt if isinstance(request.prompt, array) else array("I", request.prompt)
        self.sequences = [LiveSequence(self, i, prompt, max_tokens) for i in range(request.n)]
        for one in request.continued:
            self.sequences[one.index].continue_from(one.ids)

    @property
    def ended(self) -> bool:
        """All sequences have ended."""
        return all(s.state is SequenceState.ENDED for s in self.sequences)

    def holds_room_for(self, request: Request) -> bool:
        """Whether it is queued, and `request` fits the room that it has in the queue's bounds."""
        mine = self.request
        return (
            not self.started
            and mine.identity == request.identity
            and mine.input_tokens >= request.input_tokens
        )

    def set_max_tokens(self, max_tokens: int) -> None:
        """Change what fits, for a request that did not say how much it wants."""
        for sequence in self.sequences:
            sequence.end_length = sequence.prompt_length + max_tokens


class LiveSequence:
    """One completion. Its *known* tokens are prompt and output; `kv` of them are computed."""

    __slots__ = (
        "awaits_drafts",
        "cache_id",
        "cached",
        "charged",
        "draft_state",
        "end_length",
        "evictions",
        "first_token_at",
        "in_flight",
        "index",
        "input_length",
        "is_predictable",
        "key",
        "kv",
        "live",
        "losses",
        "lost_at",
        "prompt_length",
        "refusals",
        "sampling",
        "shared_tokens",
        "started_at",
        "state",
        "tail_shared",
        "tokens",
    )

    def __init__(self, live: LiveRequest, index: int, prompt: array[int], max_tokens: int) -> None:
        request = live.request
        self.live = live
        self.index = index
        self.key: Key = (live.account.rank, -request.priority, request.arrival, live.serial, index)
        self.sampling = request.sampling.with_seed(index_seed(request.sampling.seed, index))
        self.tokens: list[int] | array[int] = prompt  # a list of its own from its first opening on
        self.prompt_length = len(prompt)
        self.input_length = self.prompt_length  # with output that was produced elsewhere
        self.end_length = self.prompt_length + max_tokens  # LENGTH when so many are known
        self.state = SequenceState.WAITING if index == 0 else SequenceState.HELD
        # the cache
        self.cache_id = 0  # 0: none
        self.kv = 0
        self.in_flight = 0  # unanswered rows
        self.is_predictable = False  # each unanswered row adds one token, if it does not fail
        self.shared_tokens = 0  # on pages that others may hold too: its prefix hit, or where it was forked
        self.tail_shared = False  # a fork shares its last page: the next write copies it
        # speculation
        self.draft_state: DraftState | None = None  # None: off
        self.awaits_drafts = False  # for drafts of the draft executor: it gets no row meanwhile
        # faults
        self.losses = 0  # executors lost while it was in flight, since it last got on
        self.lost_at = 0  # tokens known then
        self.refusals = 0  # answers in a row that say our view of its cache is wrong
        self.charged = 0  # virtual tokens, on its account
        # for its usage
        self.evictions = 0
        self.cached: int | None = None
        self.started_at: float | None = None
        self.first_token_at: float | None = None

    # -- what happens to it ----------------------------------------------------------------------

    def happen(self, trigger: Trigger) -> None:
        """Move on in the table of states. Raises IllegalEvent."""
        self.state = after(self.state, trigger)

    def continue_from(self, ids: tuple[int, ...]) -> None:
        """These output tokens were produced elsewhere."""
        self.tokens = array("I", [*self.tokens, *ids])  # the prompt's own array is shared
        self.input_length += len(ids)

    def open(self, cache_id: int, now: float) -> None:
        """It gets a cache, with which it is in the next step. Raises IllegalEvent."""
        self.happen(Trigger.OPEN)
        self.cache_id = cache_id
        if not isinstance(self.tokens, list):
            self.tokens = self.tokens.tolist()
        if self.started_at is None:
            self.started_at = now

    def fork(self, source: LiveSequence, length: int, *, shares_tail: bool) -> None:
        """Its new cache begins as a copy of the first `length` tokens of the source's.

        shares_tail: both will write to the page that is shared last, and whoever does copies it.
        """
        self.kv = self.shared_tokens = length
        source.tail_shared |= shares_tail

    def send_decode(self) -> None:
        """A row is on its way that adds one token, if it does not fail."""
        self.in_flight += 1
        self.is_predictable = True

    def send_row(self) -> None:
        """A row is on its way of which only the answer tells how many tokens it adds."""
        self.in_flight += 1
        self.is_predictable = False

    def refuse_row(self) -> None:
        """A row was refused: those that were sent after it will be as well."""
        self.in_flight -= 1
        self.is_predictable = False

    def advance(self, kv_length: int) -> None:
        """A row computed a part of the known tokens. Raises IllegalEvent."""
        self.happen(Trigger.CHUNK)
        self.in_flight -= 1
        self.kv = kv_length

    def prefill(self, now: float) -> None:
        """A row computed the last of its tokens, and is the first to sample. Raises IllegalEvent."""
        self.happen(Trigger.SAMPLE)
        if self.first_token_at is None:
            self.first_token_at = now

    def extend(self, tokens: list[int], kv_length: int) -> Ending | None:
        """A row sampled tokens: append them, up to the one that ends the sequence. Returns why it ends."""
        self.in_flight -= 1
        self.kv = kv_length
        self.tail_shared = False
        self.refusals = 0
        known, stops = self.tokens, self.live.stops
        for token in tokens:
            known.append(token)
            if (token in stops or len(known) >= self.end_length) and (ending := self.verdict()):
                return ending
        return None

    def note_prefix_hit(self, tokens: int) -> int:
        """Its new cache began with so many computed tokens; returns how many of them count as cached."""
        self.shared_tokens = tokens
        if self.cached is not None:
            return 0
        self.cached = tokens
        return tokens

    def drop_cache(self) -> None:
        """Forget its cache, and all that was true of that one alone."""
        self.cache_id = 0
        self.kv = 0
        self.shared_tokens = 0
        self.tail_shared = False
        self.in_flight = 0
        self.is_predictable = False
        self.awaits_drafts = False

    def wait_for_drafts(self) -> None:
        """The draft executor makes drafts of it: it gets no row until they are there."""
        self.awaits_drafts = True

    def stop_waiting_for_drafts(self) -> None:
        """It may have a row again, with drafts or without."""
        self.awaits_drafts = False

    def lose_executor(self) -> int:
        """The executor was lost with a row of it; returns how often that was so since it last got on."""
        self.losses += 1
        self.lost_at = len(self.tokens)
        return self.losses

    def forget_losses(self) -> None:
        """It got on, so that they are not held against it."""
        self.losses = 0

    def count_eviction(self) -> None:
        """It lost its cache for a reason that is not its own."""
        self.evictions += 1

    def count_refusal(self) -> int:
        """The executor answered that its cache is not as we think; returns how often that was so in a row."""
        self.refusals += 1
        return self.refusals

    @property
    def got_on(self) -> bool:
        """It has tokens that it had not at the last loss that is held against it."""
        return self.losses > 0 and len(self.tokens) > self.lost_at

    # -- what is known of it ---------------------------------------------------------------------

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def source(self) -> LiveSequence | None:
        """The sequence to fork this one from: the first completion, if this one is still all prompt."""
        first = self.live.sequences[0]
        if first is self or first.state is not SequenceState.RUNNING or len(self.tokens) > self.prompt_length:
            return None
        return first

    def verdict(self) -> Ending | None:
        """Why the sequence ends at its last token, and the stop id if that is why; None: it goes on.

        A stop id among the first `min_tokens` output tokens does not end it: the executor masks them there.
        """
        last = self.tokens[-1]
        if last in self.live.stops and self.generated > self.live.request.min_tokens:
            is_eos = last in self.live.request.eos_token_ids
            return (EndReason.EOS if is_eos else EndReason.STOP_TOKEN), last
        if len(self.tokens) >= self.end_length:
            return EndReason.LENGTH, None
        return None

    def usage(self, now: float) -> CompletionUsage:
        """What it took."""
        arrival, drafts = self.live.request.arrival, self.draft_state
        drafted = drafts.drafted_by_position if drafts else ()
        accepted = drafts.accepted_by_position if drafts else ()
        return CompletionUsage(
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached or 0,
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
        )
