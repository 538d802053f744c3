"""The connection to one executor: handshake, heartbeats, and a new handshake after a loss.

    unreachable ── handshake ──► ready ──► lost ── handshake ──► ready ──► ...

A new session replaces the scheduler's last one: its caches are released, and its late steps are refused.
So after any loss, even if the executor was only frozen, no step is replayed, and sequences are recomputed.
The session of a killed scheduler process is replaced too, since both have the same owner name.

An executor counts as lost when

- its stream or connection ends: a killed process at once, a stopped one after the ping timeout, about 3 s;
- it does not answer a heartbeat within `heartbeat_timeout_s`, because its event loop hangs;
- the answer to a heartbeat says that the session has ended, or that the process is another one;
- a step makes no progress for `step_timeout_s`;
- a reply can't be parsed, or does not fit its step.

Nothing that an executor sends ends the scheduler. A long step alone is not a loss: heartbeats, which the
executor's event loop answers meanwhile, tell the age of the running step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline import errors
from paceline.aio.executor import ExecutorClient
from paceline.channel import Security
from paceline.session import Session
from service_kit.logs import Log

from scheduler_service.core.request import OutputGrammar
from scheduler_service.link.adapters import RemoteAdapters
from scheduler_service.link.codec.foreign import brief
from scheduler_service.link.codec.handshake import decode_heartbeat
from scheduler_service.link.codec.steps import encode_grammar
from scheduler_service.link.exchange import ExecutorLostError, StepExchange
from scheduler_service.link.facts import ExecutorFacts, ExecutorPhase, Heartbeat
from scheduler_service.link.handshake import (
    CompatibilityCheck,
    FailedExecutorError,
    LoadingExecutorError,
    RefusedExecutorError,
    perform_handshake,
)
from scheduler_service.model import ExecutorView

log = Log(__name__)

MAX_RESTORES = 10
"""Times in one session that adapters are loaded again which somebody else has unloaded."""
MAX_WARNINGS, MAX_WARNING_BYTES = 16, 256
"""Of one grammar, and of one request."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and timeouts of a connection, in seconds."""

    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    step_timeout_s: float = 120.0
    handshake_timeout_s: float = 10.0  # of each RPC of the handshake
    retry_s: float = 0.1  # pause between two handshakes; doubles up to `retry_max_s`
    retry_max_s: float = 0.5

    @property
    def lease_s(self) -> float:
        """Lease of sessions: a few heartbeats, so that a killed scheduler's pages are soon free."""
        return max(4.0, 4 * self.heartbeat_interval_s)


class ExecutorLink:
    """One executor, at `address`. `run` keeps the connection up; a loop opens an exchange of steps over it.

    `changed` is called when `ready` or `detail` has changed, and at each heartbeat. `owner` names the
    scheduler's sessions: the same after a restart, and no other link's; "": they have no owner.
    """

    def __init__(
        self,
        address: str,
        security: Security,
        timing: Timing,
        compatibility: CompatibilityCheck,
        changed: Callable[[], None],
        owner: str = "",
    ) -> None:
        self.address = address
        self.detail = "not reached yet"
        """Why it is not ready; "" while it is."""
        self.failure = ""
        """Why it can't load its model; "" if it can, or has begun anew."""
        self.losses = 0
        self._security = security
        self._timing = timing
        self._compatibility = compatibility
        self._owner = owner
        self._changed = changed
        self._client: ExecutorClient | None = None
        self._session: Session | None = None
        self._last_session: Session | None = None  # kept after a loss, to be replaced by the next one
        self._facts: ExecutorFacts | None = None  # as of the last handshake
        self._exchange: StepExchange | None = None
        self._lost = asyncio.Event()
        self._last_refusal = ""
        self._heartbeat = Heartbeat()  # the last one
        self._restores = 0  # of adapters, in this session
        self._restoring: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """A handshake has succeeded, and the executor has not been lost since."""
        return self._session is not None

    @property
    def draining(self) -> bool:
        """The executor drains: its sequences continue, and it takes no new ones."""
        return self._heartbeat.phase is ExecutorPhase.DRAINING

    @property
    def step_age_s(self) -> float:
        """Seconds since the oldest unanswered step was sent; 0 without one."""
        return self._exchange.step_age_s if self._exchange is not None else 0.0

    def view(self, *, active: bool, draft: bool = False) -> ExecutorView:
        """The executor's state, for ListExecutors."""
        return ExecutorView(
            address=self.address,
            connected=self.ready,
            active=active and self.ready,
            detail="draining" if self.ready and self.draining else self.detail,
            total_pages=self._heartbeat.total_pages,
            available_pages=self._heartbeat.available_pages,
            losses=self.losses,
            draft=draft,
            draining=self.draining,
        )

    # The connection

    async def run(self) -> None:
        """Connect, send heartbeats, and connect again after a loss; ends only when cancelled."""
        retry_s = self._timing.retry_s
        try:
            while True:
                self._client = ExecutorClient(self.address, security=self._security)
                try:
                    await self._connect(self._client)
                    retry_s = self._timing.retry_s
                    await self._watch(self._client)
                except FailedExecutorError as error:
                    self.failure = brief(str(error))
                    self._not_ready(f"it can't load its model: {error}")
                except LoadingExecutorError as error:
                    self.failure = ""
                    self._not_ready(str(error))
                except (errors.PacelineError, RefusedExecutorError, ValueError) as error:
                    self._not_ready(str(error))
                except Exception as error:  # a bug, perhaps met by a reply: the other executors go on
                    log.error("executor can't be used", error, address=self.address)
                    self._disconnect(f"its reply can't be handled ({type(error).__name__})")
                finally:
                    await self._client.close()
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, self._timing.retry_max_s)
        finally:
            if self._restoring is not None:
                self._restoring.cancel()
            self._disconnect("the scheduler has stopped")

    async def close_session(self, detail: str) -> None:
        """Close the session, which frees its pages at once. Not `ready` then, until `run` has reconnected.

        `detail` becomes the link's detail.
        """
        session, client = self._session, self._client
        if session is None or client is None:
            return
        try:
            await client.close_session(session.id, timeout_s=1.0)
        except errors.PacelineError as error:  # its lease will end it
            log.info("session not closed", address=self.address, detail=str(error))
        if self._session is session:  # not before the call, whose channel `_disconnect` closes
            self._disconnect(detail)

    async def _connect(self, client: ExecutorClient) -> None:
        timing = self._timing
        handshake = await perform_handshake(
            client,
            self._compatibility,
            replaces=self._last_session,
            owner=self._owner,
            lease_s=timing.lease_s,
            timeout_s=timing.handshake_timeout_s,
        )
        session = handshake.session
        self._facts = handshake.facts
        self._session = self._last_session = session
        self._heartbeat = handshake.heartbeat
        self._lost.clear()
        self._restores = 0
        self.detail = self._last_refusal = self.failure = ""
        log.info(
            "executor ready", address=self.address, model=handshake.facts.model_name, epoch=session.epoch
        )
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
        """Treat the executor as lost, because of `detail`; `run` connects to it again."""
        if self._session is None:
            return
        log.warning("executor lost", address=self.address, detail=brief(detail))
        self.losses += 1
        self._disconnect(detail)

    def _disconnect(self, detail: str) -> None:
        self._session = None
        self.detail = self._last_refusal = brief(detail)
        self._lost.set()
        if self._exchange is not None:
            self._exchange.close(self.detail)
            self._exchange = None
        self._changed()

    def _not_ready(self, detail: str) -> None:
        self.detail = detail = brief(detail)
        if detail != self._last_refusal:
            self._last_refusal = detail
            log.info("executor not ready", address=self.address, detail=detail)
            self._changed()

    @property
    def adapters(self) -> RemoteAdapters | None:
        """Its adapters; None: it is not `ready`."""
        return RemoteAdapters(self._client) if self._client is not None and self.ready else None

    def restore_adapters(self) -> None:
        """Load again what somebody else has unloaded there: a step was refused for lack of an adapter."""
        if self._restoring is None or self._restoring.done():
            self._restoring = asyncio.create_task(self._restore_adapters(), name=f"adapters {self.address}")

    async def _restore_adapters(self) -> None:
        client, session = self._client, self._session
        if client is None or session is None:
            return
        self._restores += 1
        log.warning("adapters are loaded again", address=self.address)
        detail = "adapters are unloaded there again and again"
        try:
            await self._compatibility.prepare(client)
        except (errors.PacelineError, RefusedExecutorError, ValueError) as error:
            detail, self._restores = str(error), MAX_RESTORES + 1
        if self._restores > MAX_RESTORES and self._session is session:
            self.lose(detail)

    # Steps

    def open_exchange(self) -> StepExchange:
        """Begin to exchange steps over the connection. Raises ExecutorLostError if it is not `ready`."""
        if self._client is None or self._session is None or self._facts is None:
            raise ExecutorLostError(self.detail)
        stream, facts = self._client.stream(), self._facts
        self._exchange = StepExchange(
            stream,
            self._session,
            facts.capacity,
            facts.bounds,
            self.lose,
            grammars=facts.max_grammar_bytes > 0,
        )
        return self._exchange

    async def check_grammar(self, grammar: OutputGrammar, timeout_s: float) -> str | tuple[str, ...]:
        """Why the executor can't compile a grammar; or warnings about it, none if nobody can be asked.

        Raises TimeoutError if it does not say within `timeout_s`.
        """
        if self._client is None or self._session is None:
            return ()
        try:
            warnings = await self._client.check_grammar(encode_grammar(grammar), timeout_s=timeout_s)
            return tuple(
                warning.encode()[:MAX_WARNING_BYTES].decode(errors="ignore")
                for warning in warnings[:MAX_WARNINGS]
            )
        except errors.InvalidRequest as error:
            return brief(error.message)
        except errors.DeadlineExceeded:
            raise TimeoutError from None
        except errors.PacelineError:  # it is being lost: the opening will tell
            pass
        return ()
