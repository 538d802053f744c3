"""Collects the core's live figures from the objects that own them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from heapq import nlargest

from scheduler_service.core.drafting.speculator import Speculator
from scheduler_service.core.fair_queue import FairQueue
from scheduler_service.core.forecast import Forecast
from scheduler_service.core.sequence import LiveRequest
from scheduler_service.core.sequence_pool import SequencePool
from scheduler_service.core.snapshot import AdapterUse, Share, Snapshot, Totals
from scheduler_service.core.states import WITH_CACHE, SequenceState
from scheduler_service.core.target_executor import TargetExecutor
from scheduler_service.core.waiting.reasons import WaitReason


def take_snapshot(
    pool: SequencePool, target: TargetExecutor, forecast: Forecast, speculator: Speculator, counters: Totals
) -> Snapshot:
    """The figures as they are now; the counters are copied."""
    limits = target.limits
    queued_tokens = pool.queue.queued_tokens + pool.held_tokens
    return Snapshot(
        executor=target.connected,
        running=len(pool.running),
        waiting=len(pool.queue) + pool.held,
        waiting_tokens=queued_tokens,
        uncomputed_tokens=queued_tokens + sum(len(s.tokens) - s.kv for s in pool.running),
        page_size=limits.page_size if limits else 0,
        max_sequences=limits.max_sequences if limits else 0,
        in_flight=len(target.in_flight),
        total_pages=limits.total_pages if limits else 0,
        free_pages=target.free_pages,
        evictable_pages=target.evictable_pages,
        step_s=forecast.step_s,
        step_rows=forecast.step_rows,
        draft_executor=speculator.connected,
        draft_step_s=speculator.draft_step_s,
        counters=replace(counters, preemptions=pool.preemptions),
        waits=pool.waits.totals.times(),
    )


def count_reasons(pool: SequencePool) -> Counter[WaitReason]:
    """The sequences that wait, by reason. Takes time by the number of identities, not of sequences."""
    waits, counts = pool.waits, Counter[WaitReason]()
    counts[WaitReason.PREFIX] += pool.held
    for account in pool.queue.active:
        queued = pool.queue.queue_of(account)
        if queued:
            alike = queued.like_the_first()
            counts[waits.reason_of(queued[0])] += 1
            counts[WaitReason.OWN_EARLIER] += alike - 1
            counts[WaitReason.OWN_PRIORITY] += len(queued) - alike
    if (head := waits.head) is not None and (queued := pool.queue.queue_of(head.live.account))[0] is not head:
        counts[waits.reason] += 1  # those before it wait for slots
        counts[waits.behind(head)] -= 1
    return counts


def largest_shares(queue: FairQueue, count: int) -> list[Share]:
    """The shares of the `count` identities that were served most."""
    return [
        Share(a.identity, a.taken, a.refused, a.tokens, a.running, a.queued_requests)
        for a in nlargest(count, queue.accounts, key=lambda a: (a.tokens, a.identity))
    ]


def count_adapters(requests: Iterable[LiveRequest]) -> dict[bytes, AdapterUse]:
    """The sequences of these requests that have not ended, by adapter; those without one left out."""
    uses: dict[bytes, AdapterUse] = {}
    for live in requests:
        if live.request.adapter:
            use = uses.setdefault(live.request.adapter, AdapterUse())
            for sequence in live.sequences:
                use.running += sequence.state in WITH_CACHE
                use.waiting += sequence.state in (SequenceState.QUEUED, SequenceState.HELD)
    return uses
