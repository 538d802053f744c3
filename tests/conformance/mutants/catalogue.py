"""The mutants: each breaks one promise of our engine, and names the check that must notice.

A mutant is a patch applied before the process starts; the rest of it is the real executor on the oracle
backend, whose logits depend on every cached slot. The engine's own audit is switched off for all of
them: an executor that is wrong has no such conscience.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from executor_service.backends import numpy_sampler
from executor_service.cache.kv_cache import KvCache, OutOfPages
from executor_service.cache.sequence import CachedSequence
from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession, Sessions
from executor_service.contract import noise
from executor_service.contract.plan import Abandoned, OutputMode, Reason, Refusal, RequestRefused, RowResult
from executor_service.rpc import servicer
from executor_service.rpc.codec import rows as rows_codec
from executor_service.rpc.codec import tokens as tokens_codec
from executor_service.steps.commit import StepCommit
from executor_service.steps.engine import Engine
from executor_service.steps.job_queue import JobQueue
from executor_service.steps.pipeline import Pipeline
from executor_service.steps.reservation import RowReservation
from executor_service.steps.savepoint import Savepoint
from executor_service.steps.step_rows import StepRows
from executor_service.steps.worker import DeviceWorker
from tests.conformance.kit.target import SLOW


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken promise."""

    name: str
    breaks: str
    check: str  # a file of the kit in which at least one check must fail
    apply: Callable[[], None]
    backend: str  # a target of the kit: what the rest of the executor is


MUTANTS: dict[str, Mutant] = {}


def mutant(check: str, backend: str = "oracle") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a patch under its function's name; its docstring says what it breaks."""

    def enter(patch: Callable[[], None]) -> Callable[[], None]:
        name = patch.__name__.replace("_", "-")
        MUTANTS[name] = Mutant(name, str(patch.__doc__), check, patch, backend)
        return patch

    return enter


def apply(name: str) -> None:
    """Break this process's executor."""
    SequenceStore.check = lambda self: None  # type: ignore[method-assign]
    MUTANTS[name].apply()


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by `around`, which gets the original as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


# Pages and the prefix cache


@mutant("test_pages.py")
def stale_page() -> None:
    """an evicted page stays known to the prefix cache, which hands it out with another's content"""

    def new(self: KvCache) -> int:
        page = self._free.pop() if self._free else self._cached.popitem(last=False)[0]
        self._references[page] = 1
        return page

    KvCache._new = new  # type: ignore[method-assign]


@mutant("test_prefix_cache.py")
def page_published_before_it_is_full() -> None:
    """a page enters the prefix cache when its tokens are known, not when they are stored"""
    wrap(StepCommit, "_finish", _finish_publishing_known)


def _finish_publishing_known(
    original: Any, self: StepCommit, row: Any, length: int, known: int, output: Any
) -> None:
    original(self, row, length, known, output)
    table, page_size = row.sequence.table, self._pages.page_size
    if row.outputs and min(known // page_size, table.count) > len(table.hashes):
        self._pages.publish(table, row.sequence.ids, min(known, table.count * page_size))


@mutant("test_truncate.py")
def published_page_overwritten() -> None:
    """a page of the prefix cache is written in place after a truncate into it"""
    _reserve_copying_only(lambda cache, page: cache._references[page] > 1)


@mutant("test_fork.py")
def copy_on_write_omitted() -> None:
    """a fork and its source write into the same partial page"""
    _reserve_copying_only(lambda cache, page: cache._references[page] == 1 and page in cache._hash_of)


def _reserve_copying_only(must_copy: Callable[[KvCache, int], bool]) -> None:
    def reserve(original: Any, self: KvCache, table: Any, start: int, end: int) -> Any:
        index = start // self.page_size
        if index < table.count and start < end and not must_copy(self, table.at(index)):
            start = min(end, (index + 1) * self.page_size)  # the page it is in is taken as it is
        return original(self, table, start, end)

    wrap(KvCache, "reserve", reserve)


@mutant("test_prefix_cache.py")
def salt_ignored() -> None:
    """prefixes are shared across salts"""
    wrap(KvCache, "open", lambda original, self, salt, tokens: original(self, b"", tokens))


@mutant("test_prefix_cache.py")
def hash_without_its_past() -> None:
    """a page is known by its own tokens alone, whatever came before it"""
    wrap(KvCache, "_chain", lambda original, self, parent, tokens, index: original(self, b"", tokens, index))


@mutant("test_prefix_cache.py")
def hash_misses_a_token() -> None:
    """the last token of a page is left out of its hash"""

    def chain(original: Any, self: KvCache, parent: bytes, tokens: Any, index: int) -> bytes:
        masked = tokens.copy()
        masked[self.page_size - 1 :: self.page_size] = 0
        digest: bytes = original(self, parent, masked, index)
        return digest

    wrap(KvCache, "_chain", chain)


@mutant("test_pages.py")
def reservation_by_halves() -> None:
    """a reservation that fails keeps the pages it got so far"""

    def reserve(original: Any, self: KvCache, table: Any, start: int, end: int) -> Any:
        try:
            return original(self, table, start, end)
        except OutOfPages as error:
            for _ in range(error.available):
                table.append(self._new())
            raise

    wrap(KvCache, "reserve", reserve)
    wrap(RowReservation, "_open", _without_undo)


def _without_undo(original: Any, self: RowReservation, index: int, opening: Any) -> Any:
    cut, self._pages.cut = self._pages.cut, lambda table, length: None  # type: ignore[method-assign]
    try:
        return original(self, index, opening)
    finally:
        self._pages.cut = cut  # type: ignore[method-assign]


@mutant("test_pages.py")
def released_pages_lost() -> None:
    """releasing a cache forgets it and keeps its last page"""

    def release(original: Any, self: SequenceStore, session: ClientSession, cache_id: int) -> bool:
        if (sequence := session.caches.get(cache_id)) is not None and sequence.table.count:
            self.pages._take(sequence.table.at(sequence.table.count - 1))
        known: bool = original(self, session, cache_id)
        return known

    wrap(SequenceStore, "_release", release)


# Truncate, fork, ops


@mutant("test_truncate.py")
def off_by_one_truncate() -> None:
    """truncating keeps one token more than asked"""

    def truncate(original: Any, self: SequenceStore, session: ClientSession, op: Any, now_s: float) -> Any:
        sequence = session.caches.get(op.cache_id)
        if sequence is not None and op.length < sequence.length:
            result = original(self, session, replace(op, length=op.length + 1), now_s)
            result.kv_length = op.length
            return result
        return original(self, session, op, now_s)

    wrap(SequenceStore, "_truncate", truncate)


@mutant("test_truncate.py")
def truncate_frees_nothing() -> None:
    """truncating shortens the cache and keeps its pages"""

    def truncate(original: Any, self: SequenceStore, session: ClientSession, op: Any, now_s: float) -> Any:
        cut, self.pages.cut = self.pages.cut, lambda table, length: None  # type: ignore[method-assign]
        try:
            return original(self, session, op, now_s)
        finally:
            self.pages.cut = cut  # type: ignore[method-assign]

    wrap(SequenceStore, "_truncate", truncate)


@mutant("test_decode.py")
def truncate_keeps_what_is_pending() -> None:
    """after a truncate the old next token is still fed"""

    def forget(original: Any, self: CachedSequence, length: int) -> None:
        known = self.known
        original(self, length)
        self.known = min(length + 1, known)
        self.sampled = self.known > length

    wrap(CachedSequence, "forget_pending", forget)


@mutant("test_fork.py")
def fork_with_its_sources_sampling() -> None:
    """a fork samples under its source's seed and rules"""

    def fork(original: Any, self: SequenceStore, session: ClientSession, op: Any, now_s: float) -> Any:
        source = session.caches.get(op.source_id)
        sampling = op.sampling if source is None else source.sampling
        return original(self, session, replace(op, sampling=sampling), now_s)

    wrap(SequenceStore, "_fork", fork)


@mutant("test_ops.py")
def ops_out_of_order() -> None:
    """a step's ops are applied last to first"""

    def begin(original: Any, self: Pipeline, request: Any) -> Any:
        plan = replace(request.plan, ops=request.plan.ops[::-1])
        return original(self, request._replace(plan=plan))

    def take_finished(original: Any, self: Pipeline) -> Any:
        return [
            step._replace(result=replace(step.result, ops=step.result.ops[::-1])) for step in original(self)
        ]

    wrap(Pipeline, "begin", begin)
    wrap(Pipeline, "take_finished", take_finished)


# Rows


@mutant("test_verify.py")
def lost_rollback() -> None:
    """rejected drafts stay in the cache"""

    def finish(original: Any, self: StepCommit, row: Any, length: int, known: int, output: Any) -> None:
        rejected = len(row.drafts) - (len(row.tokens) - 1) if row.tokens and len(row.drafts) else 0
        ids = row.sequence.ids
        if rejected:
            ids[length : length + rejected] = row.drafts[len(row.tokens) - 1 :]
            ids[length + rejected] = row.tokens[-1]
        original(self, row, length + rejected, known + rejected, output)

    wrap(StepCommit, "_finish", finish)


@mutant("test_verify.py")
def rejected_draft_goes_on() -> None:
    """after a rejection the next row feeds the draft instead of the token that was sampled"""

    def finish(original: Any, self: StepCommit, row: Any, length: int, known: int, output: Any) -> None:
        if row.tokens and len(row.tokens) <= len(row.drafts):
            row.sequence.ids[length] = row.drafts[len(row.tokens) - 1]
        original(self, row, length, known, output)

    wrap(StepCommit, "_finish", finish)


@mutant("test_verify.py")
def draft_taken_on_trust() -> None:
    """the first draft is accepted unseen"""

    def absorb(original: Any, self: StepCommit, row: Any, output: Any) -> Any:
        if len(row.drafts) and output.tokens is not None:
            output.tokens[len(output.tokens) - len(row.drafts) - 1] = row.drafts[0]
        return original(self, row, output)

    wrap(StepCommit, "_absorb", absorb)


@mutant("test_decode.py")
def kv_length_ignored() -> None:
    """a row is computed whatever KV length it expects"""

    def proceed(original: Any, self: RowReservation, index: int, row: Any) -> Any:
        sequence = self._session.caches.get(row.cache_id)
        return original(self, index, row if sequence is None else replace(row, kv_length=sequence.length))

    wrap(RowReservation, "_continue", proceed)


@mutant("test_steps.py")
def steps_off_by_one() -> None:
    """a row of several steps ends one early"""

    def proceed(original: Any, self: RowReservation, index: int, row: Any) -> Any:
        return original(self, index, replace(row, steps=max(row.steps - 1, 1)))

    wrap(RowReservation, "_continue", proceed)


@mutant("test_chunks.py")
def chunk_samples_too_early() -> None:
    """a chunk samples although the prompt goes on"""

    def always_sample(original: Any, self: RowReservation, *args: Any) -> Any:
        row = original(self, *args)
        if not isinstance(row, Refusal) and row.output is not OutputMode.NONE and not row.outputs:
            row.outputs = 1
        return row

    wrap(RowReservation, "_open", always_sample)
    wrap(RowReservation, "_continue", always_sample)


@mutant("test_batch.py")
def neighbours_poisoned() -> None:
    """a refused row takes the rows behind it along"""

    def reserve(original: Any, self: RowReservation) -> StepRows:
        rows: StepRows = original(self)
        bad = [i for i, result in enumerate(rows.results) if result.refusal is not None]
        for row in [row for row in rows.accepted if bad and row.index > bad[0]]:
            rows.accepted.remove(row)
            refusal = Refusal(Reason.INVALID, "another row was wrong")
            rows.results[row.index] = RowResult(refusal=refusal)
        return rows

    wrap(RowReservation, "reserve", reserve)


@mutant("test_bad_input.py")
def limits_unchecked() -> None:
    """token ids beyond the vocabulary are let in"""

    def tokens(original: Any, field: str, packed: Any, limits: Any) -> Any:
        return original(field, [token % limits.vocab_size for token in packed], limits)

    wrap(tokens_codec, "decode_tokens", tokens)


# Sampling


@mutant("test_sampling.py")
def noise_at_the_wrong_position() -> None:
    """the noise is keyed by the last token's position instead of the new one's"""
    wrap(noise, "key", lambda original, seed, position: original(seed, position - 1))
    wrap(noise, "keys", lambda original, seeds, positions: original(seeds, positions - 1))


@mutant("test_sampling.py")
def penalties_see_the_prompt() -> None:
    """presence and frequency penalties count the prompt's tokens too"""

    def choose(original: Any, logits: Any, history: Any, prompt_length: int, sampling: Any) -> Any:
        return original(logits, history, 0, sampling)

    wrap(numpy_sampler, "choose", choose)


@mutant("test_sampling.py")
def min_tokens_off_by_one() -> None:
    """stop ids are let through one token too early"""

    def choose(original: Any, logits: Any, history: Any, prompt_length: int, sampling: Any) -> Any:
        earlier = replace(sampling, min_tokens=max(sampling.min_tokens - 1, 0))
        return original(logits, history, prompt_length, earlier)

    wrap(numpy_sampler, "choose", choose)


@mutant("test_sampling.py")
def nucleus_before_temperature() -> None:
    """top-p looks at the probabilities of the raw logits"""

    def keep(original: Any, scaled: Any, sampling: Any) -> Any:
        return original(scaled * np.float32(sampling.temperature or 1.0), sampling)

    wrap(numpy_sampler, "keep", keep)


# Sessions, order, errors


@mutant("test_replay.py")
def replay_applies_twice() -> None:
    """a replayed step is done again"""

    def replay(original: Any, self: ClientSession, plan: Any) -> Any:
        original(self, plan)

    wrap(ClientSession, "replay", replay)


@mutant("test_replay.py")
def gaps_are_let_through() -> None:
    """a step is done although one before it is missing"""

    def replay(original: Any, self: ClientSession, plan: Any) -> Any:
        if plan.step_id > self.last_step_id:
            return None
        return original(self, plan)

    wrap(ClientSession, "replay", replay)


@mutant("test_sessions.py")
def sessions_not_isolated() -> None:
    """a cache id of another session is found"""

    class Leaky(dict[int, Any]):
        def __init__(self, sessions: Sessions) -> None:
            self._sessions = sessions
            super().__init__()

        def get(self, key: int, default: Any = None) -> Any:
            everywhere = [self, *(session.caches for session in self._sessions)]
            return next((caches[key] for caches in everywhere if key in caches), default)

    def open_(original: Any, self: Sessions, *args: Any) -> ClientSession:
        session: ClientSession = original(self, *args)
        session.caches = Leaky(self)
        return session

    wrap(Sessions, "open", open_)


@mutant("test_sessions.py")
def cache_ids_used_again() -> None:
    """a released cache's id opens a new one"""
    wrap(ClientSession, "used", lambda original, self, cache_id: cache_id in self.caches)


@mutant("test_sessions.py")
def no_fence() -> None:
    """a replaced session is merely forgotten"""
    wrap(Sessions, "remove", lambda original, self, session, *, fence: original(self, session, fence=False))


@mutant("test_sessions.py")
def leases_never_end() -> None:
    """nobody's caches are released for silence"""
    wrap(Engine, "expire", lambda original, self: None)


@mutant("test_sessions.py")
def heartbeats_ignored() -> None:
    """asking for a session's status does not renew its lease"""
    wrap(
        Sessions,
        "get",
        lambda original, self, session_id, caller: (
            self.find(session_id, caller) or original(self, session_id, caller)
        ),
    )


@mutant("test_sessions.py")
def epoch_ignored() -> None:
    """a request meant for another life of the executor is served"""
    wrap(SequenceStore, "check_epoch", lambda original, self, epoch: None)


@mutant("test_stream.py")
def refusal_ends_the_stream() -> None:
    """a step refused as a whole ends the stream it came on"""

    def encode_error(original: Any, refusal: Refusal, *index: int) -> Any:
        if not index:  # the whole step's, not a row's
            raise RequestRefused(refusal.reason, refusal.message)
        return original(refusal, *index)

    wrap(servicer, "encode_error", encode_error)


@mutant("test_caches.py")
def owner_ignored() -> None:
    """a restarted client's former session keeps its pages until its lease ends"""
    wrap(Sessions, "owned_by", lambda original, self, owner, caller: None)


@mutant("test_caches.py")
def upper_bound_taken_for_the_length() -> None:
    """a row that gives an upper bound of its KV length is refused as if it were the length"""

    def decode_step(original: Any, *args: Any) -> Any:
        plan = original(*args)
        for row in plan.rows:
            if not isinstance(row, Refusal):
                row.is_bound = False
        return plan

    wrap(servicer, "decode_step", decode_step)


@mutant("test_caches.py")
def pending_tokens_forgotten() -> None:
    """GetCaches leaves out what is pending"""

    def look(original: Any, *args: Any) -> Any:
        last_step_id, views = original(*args)
        return last_step_id, [replace(view, pending=view.pending[:0]) for view in views]

    wrap(Engine, "look", look)


@mutant("test_caches.py")
def packed_prompt_read_big_endian() -> None:
    """the bytes of a packed prompt are taken in the wrong order"""

    def opening_tokens(original: Any, field: str, opening: Any, limits: Any) -> Any:
        packed = opening.packed_tokens
        opening.packed_tokens = np.frombuffer(packed, ">u4").astype("<u4").tobytes() if packed else b""
        return original(field, opening, limits)

    wrap(rows_codec, "opening_tokens", opening_tokens)


@mutant("test_stream.py")
def stream_error_without_its_step() -> None:
    """a step that was refused on a stream is answered without its step id"""
    from paceline.executor.v1 import executor_pb2 as pb

    original = pb.StreamUnifiedDecodeResponse

    def response(**fields: Any) -> Any:
        return original()

    class Messages:
        StreamUnifiedDecodeResponse = staticmethod(response)

        def __getattr__(self, name: str) -> Any:
            return getattr(pb, name)

    setattr(servicer, "pb", Messages())  # noqa: B010  # mypy: an import is no attribute of its module


# Clients that leave


@mutant("test_leaving.py", SLOW)
def cancelled_step_half_undone() -> None:
    """a step given up in the middle takes back its rows and leaves its ops applied"""
    Savepoint.restore = Savepoint.discard  # type: ignore[method-assign]


@mutant("test_leaving.py", SLOW)
def cancelled_opening_stays() -> None:
    """a step given up in the middle leaves the caches that it opened, without their tokens"""
    StepRows.undo = lambda self, store: None  # type: ignore[method-assign]


@mutant("test_leaving.py", SLOW)
def cancelled_step_uses_its_id_up() -> None:
    """a step given up in the middle counts as done, but there is no reply of it"""

    def begin(original: Any, self: Pipeline, request: Any) -> Any:
        try:
            yield from original(self, request)
        except Abandoned:
            self._store.sessions.get(request.plan.session_id, request.caller).advance(request.plan)
            raise

    wrap(Pipeline, "begin", begin)


@mutant("test_leaving.py", SLOW)
def replays_leave_with_the_first() -> None:
    """a step whose first client left is given up although another waits for it"""
    wrap(JobQueue, "is_wanted", lambda original, self, job: job.is_wanted)
    wrap(Pipeline, "begin", _refusing_what_was_given_up)


def _refusing_what_was_given_up(original: Any, self: Pipeline, request: Any) -> Any:
    given_up = self.__dict__.setdefault("given_up", set())
    if request.plan.digest in given_up:
        raise RequestRefused(Reason.STEP_FORGOTTEN, "the step was given up")
    try:
        yield from original(self, request)
    except Abandoned:
        given_up.add(request.plan.digest)
        raise


@mutant("test_leaving.py", SLOW)
def closed_stream_cancels() -> None:
    """closing a stream gives up the step that it sent"""
    wrap(DeviceWorker, "submit_step", lambda original, self, *args, kept: original(self, *args, kept=False))
