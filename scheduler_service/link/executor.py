"""The connection to one executor: handshake, heartbeats, steps, and a new handshake after a loss.

    unreachable ── greet (GetStatus, GetInfo, GetTokenizer, OpenSession) ──► ready ──► lost ──► ...

A new session replaces the scheduler's last one: its caches are released, and its late steps are refused.
So after any loss, even if the executor was only frozen, no step is replayed, and sequences are recomputed.
The session of a killed scheduler process is replaced too, since both have the same owner name.

An executor is lost when its stream or connection ends (a killed process at once, a stopped one
after the channel's ping timeout, about 3 s), when it does not answer a heartbeat within
`heartbeat_timeout_s` (its event loop hangs), when it no longer knows our session, when a step
makes no progress for `step_timeout_s`, or when a reply can't be parsed or does not fit its step. Nothing
that an executor sends ends the scheduler. A long step is not a loss: the heartbeat, answered by the
executor's event loop, tells the age of the running step.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

from paceline import errors
from paceline.aio.executor import ExecutorClient, StepStream
from paceline.channel import Security
from paceline.service.logs import Log
from paceline.session import Session

from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer
from scheduler_service.link.codec.foreign import brief
from scheduler_service.link.codec.handshake import decode_facts, decode_heartbeat, decode_tokenizer
from scheduler_service.link.codec.steps import decode_result, encode_step
from scheduler_service.link.facts import Bounds, ExecutorFacts, ExecutorPhase, Heartbeat
from scheduler_service.model import ExecutorView, TokenizerSource

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to wait, in seconds."""

    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    step_timeout_s: float = 120.0
    greeting_timeout_s: float = 10.0  # of each of its RPCs
    retry_s: float = 0.1  # doubles ...
    retry_max_s: float = 0.5  # ... up to here

    @property
    def lease_s(self) -> float:
        """Lease of our sessions: a few heartbeats, so that a killed scheduler's pages are soon free."""
        return max(4.0, 4 * self.heartbeat_interval_s)


class ExecutorLostError(Exception):
    """The executor, or our session on it, is gone; the message says how."""


class RefusedExecutorError(Exception):
    """This executor can't serve our sequences; the message says why."""


class Doorkeeper(Protocol):
    """Decides which executors may serve."""

    def check(self, facts: ExecutorFacts) -> bool:
        """Whether its tokenizer is needed too. Raises RefusedExecutorError if it won't do."""

    async def learn(self, facts: ExecutorFacts, tokenizer: TokenizerSource) -> None:
        """What was needed. Raises RefusedExecutorError if it won't do."""


@dataclass(frozen=True, slots=True)
class _Sent:
    plan: PlannedStep
    step_id: int
    at: float  # time.monotonic()


class ExecutorLink:
    """One executor at `address`. `run` keeps it greeted; the loop drives it while it is `ready`."""

    def __init__(
        self,
        address: str,
        security: Security,
        timing: Timing,
        doorkeeper: Doorkeeper,
        changed: Callable[[], None],
        owner: str = "",
    ) -> None:
        self.address = address
        self.detail = "not reached yet"
        """What it is waiting for, when not ready."""
        self.losses = 0
        self.capacity: Capacity | None = None
        self._security = security
        self._timing = timing
        self._doorkeeper = doorkeeper
        self._owner = owner  # of our sessions there: the same after a restart, nobody else's ever
        self._changed = changed  # called when `ready` or `detail` has changed, and at each heartbeat
        self._client: ExecutorClient | None = None
        self._session: Session | None = None
        self._last: Session | None = None  # the session, also when it was lost
        self._stream: StepStream | None = None
        self._bounds: Bounds | None = None
        self._sent: deque[_Sent] = deque()  # unanswered
        self._lost = asyncio.Event()
        self._last_refusal = ""
        self._heartbeat = Heartbeat()  # the last one

    @property
    def ready(self) -> bool:
        """It was greeted and has not been lost since."""
        return self._session is not None

    @property
    def retiring(self) -> bool:
        """It drains: its sequences go on, and it takes no new ones."""
        return self._heartbeat.phase is ExecutorPhase.DRAINING

    @property
    def step_age_s(self) -> float:
        """Seconds since the oldest unanswered step was sent; 0 without one."""
        return time.monotonic() - self._sent[0].at if self._sent else 0.0

    def view(self, *, active: bool, draft: bool = False) -> ExecutorView:
        """For ListExecutors."""
        return ExecutorView(
            address=self.address,
            connected=self.ready,
            active=active and self.ready,
            detail="draining" if self.ready and self.retiring else self.detail,
            total_pages=self._heartbeat.total_pages,
            available_pages=self._heartbeat.available_pages,
            losses=self.losses,
            draft=draft,
            draining=self.retiring,
        )

    # Being there

    async def run(self) -> None:
        """Greet, watch, and greet again; ends only when cancelled."""
        retry_s = self._timing.retry_s
        try:
            while True:
                self._client = ExecutorClient(self.address, security=self._security)
                try:
                    await self._greet(self._client)
                    retry_s = self._timing.retry_s
                    await self._watch(self._client)
                except (errors.PacelineError, RefusedExecutorError, ValueError) as error:
                    self._not_ready(str(error))
                except Exception as error:  # whatever it sent, it is this executor's fault or ours alone
                    log.error("executor can't be greeted", error, address=self.address)
                    self._part(f"what it says can't be handled ({type(error).__name__})")
                finally:
                    await self._client.close()
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, self._timing.retry_max_s)
        finally:
            self._part("the scheduler has stopped")

    async def leave(self, detail: str) -> None:
        """Close our session, which frees its pages at once; unused until `run` has reconnected."""
        session, client = self._session, self._client
        if session is None or client is None:
            return
        try:
            await client.close_session(session.id, timeout_s=1.0)
        except errors.PacelineError as error:  # its lease will end it
            log.info("session not closed", address=self.address, detail=str(error))
        if self._session is session:  # after the call: parting closes its channel
            self._part(detail)

    async def _greet(self, client: ExecutorClient) -> None:
        timeout_s = self._timing.greeting_timeout_s
        heartbeat = decode_heartbeat(await client.get_status(timeout_s=timeout_s))
        match heartbeat.phase:
            case ExecutorPhase.LOADING:
                raise RefusedExecutorError(
                    f"{heartbeat.loading or 'loading'} ({heartbeat.load_fraction:.0%})"
                )
            case ExecutorPhase.DRAINING:
                raise RefusedExecutorError("draining")
            case None:
                raise RefusedExecutorError("in an unknown state")
        facts = decode_facts(await client.get_info(timeout_s=timeout_s))
        if self._doorkeeper.check(facts):
            try:
                tokenizer = decode_tokenizer(await client.get_tokenizer(timeout_s=timeout_s))
            except errors.NotFound:
                tokenizer = TokenizerSource()  # token ids only
            await self._doorkeeper.learn(facts, tokenizer)
        last = self._last if self._last is not None and self._last.epoch == facts.epoch else None
        session = await client.open_session(
            replaces=last.id if last is not None else 0,
            lease_ms=round(self._timing.lease_s * 1000),
            label="paceline scheduler",
            owner=self._owner,
            timeout_s=timeout_s,
        )
        if session.epoch != facts.epoch:
            raise RefusedExecutorError("restarted while it was greeted")
        if not session.id:  # the default session, which everybody shares
            raise RefusedExecutorError("it opened no session")
        self.capacity = facts.capacity
        self._bounds = Bounds(
            facts.vocabulary.size, facts.capacity.context_length, facts.capacity.total_pages
        )
        self._session = self._last = session
        self._heartbeat = heartbeat
        self._lost.clear()
        self.detail = self._last_refusal = ""
        log.info("executor ready", address=self.address, model=facts.model_name, epoch=session.epoch)
        self._changed()

    async def _watch(self, client: ExecutorClient) -> None:
        timing = self._timing
        while not self._lost.is_set():
            session = self._session
            assert session is not None
            try:
                heartbeat = decode_heartbeat(
                    await client.get_status(session.id, session.epoch, timeout_s=timing.heartbeat_timeout_s)
                )
            except errors.PacelineError as error:
                self.lose(f"no heartbeat: {error}")
                return
            if heartbeat.epoch != session.epoch:
                self.lose(f"a heartbeat of epoch {heartbeat.epoch} instead of {session.epoch}")
                return
            self._heartbeat = heartbeat
            running_s = heartbeat.step_age_s
            if self.step_age_s > timing.step_timeout_s and not 0 < running_s < timing.step_timeout_s:
                self.lose(f"a step made no progress for {timing.step_timeout_s:g} s")
                return
            self._changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(timing.heartbeat_interval_s):
                    await self._lost.wait()

    def lose(self, detail: str) -> None:
        """The executor is gone, as far as we can tell; `run` will greet it again."""
        if self._session is None:
            return
        log.warning("executor lost", address=self.address, detail=brief(detail))
        self.losses += 1
        self._part(detail)

    def _part(self, detail: str) -> None:
        self._session = None
        self.detail = self._last_refusal = brief(detail)
        self._sent.clear()
        self._lost.set()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._changed()

    def _not_ready(self, detail: str) -> None:
        self.detail = detail = brief(detail)
        if detail != self._last_refusal:
            self._last_refusal = detail
            log.info("executor not ready", address=self.address, detail=detail)
            self._changed()

    # Being driven

    def open_stream(self) -> None:
        """Begin to drive it. Raises ExecutorLostError."""
        if self._client is None or self._session is None:
            raise ExecutorLostError(self.detail)
        self._stream = self._client.stream()

    def check(self) -> None:
        """Raises ExecutorLostError if it was lost since `open_stream`."""
        if self._stream is None:
            raise ExecutorLostError(self.detail)

    async def send(self, plan: PlannedStep) -> None:
        """Send one step; returns when it is on its way. Raises ExecutorLostError."""
        stream, session = self._stream, self._session
        if stream is None or session is None:
            raise ExecutorLostError(self.detail)
        header = session.header()
        step = encode_step(plan, header)
        self._sent.append(_Sent(plan, header.step_id, time.monotonic()))
        try:
            await stream.send(step)
        except errors.PacelineError as error:
            self._fail(stream, f"the stream broke: {error}")

    async def receive(self) -> StepAnswer:
        """The answer to the oldest unanswered step. Raises ExecutorLostError."""
        stream, session, bounds = self._stream, self._session, self._bounds
        if stream is None or session is None or bounds is None:
            raise ExecutorLostError(self.detail)
        try:
            message = await stream.recv()
            sent = self._sent.popleft()
            if (message.step_id, message.epoch) != (sent.step_id, session.epoch):
                raise ValueError(f"step {message.step_id}, epoch {message.epoch}, which was not sent")
            return decode_result(sent.plan, message, bounds)
        except errors.PacelineError as error:
            # A step that was refused whole is no answer to any row: our session is gone, or we
            # disagree on where it stands. Either way the way out is a new session.
            self._fail(stream, f"the stream broke: {error}")
        except (ValueError, IndexError) as error:
            self._fail(stream, f"an answer that does not fit its step: {error}")

    def _fail(self, stream: StepStream, detail: str) -> NoReturn:
        if self._stream is not stream:  # lost before, and maybe there again
            raise ExecutorLostError(self.detail)
        self.lose(detail)
        raise ExecutorLostError(detail)
