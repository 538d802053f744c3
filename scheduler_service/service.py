"""The scheduler as one object, from start to drain: core, executors, streams, tokenizers and loops."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING

from service_kit.identity import Identity
from service_kit.logs import Log

from scheduler_service.adapters import AdapterAdmin
from scheduler_service.config import SchedulerSettings
from scheduler_service.core.request import DraftingWish, DraftSource
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.watchdog import Fault
from scheduler_service.directory.listing import Listing, Load
from scheduler_service.directory.live import LiveDirectory
from scheduler_service.directory.peers import Peers
from scheduler_service.errors import RETRY_AFTER_S, ErrorReason, ServiceError
from scheduler_service.grammars import GrammarChecks
from scheduler_service.link.drafts import DraftPool
from scheduler_service.link.executor import MAX_WARNING_BYTES
from scheduler_service.link.pool import ExecutorPool, Served
from scheduler_service.link.required_adapters import WantedAdapters
from scheduler_service.loop.draft_loop import DraftLoop
from scheduler_service.loop.loop import Loop
from scheduler_service.loop.wake import Wake
from scheduler_service.metrics.metrics import MAX_IDENTITIES, Telemetry
from scheduler_service.metrics.rates import Rates
from scheduler_service.model import ExecutorView, ServedModel, ServiceState
from scheduler_service.streams.registry import StreamRegistry
from scheduler_service.text.pool import TextPool

if TYPE_CHECKING:  # they import OpenTelemetry
    from service_kit.otlp import SpanSender

    from scheduler_service.spans import Spans

log = Log(__name__)

TICK_S = 0.5
"""Maximum seconds between two updates of health and metrics, and between two checks for stalled readers."""
STUCK_STEP_S = 30.0
"""Age of an unanswered step from which health is NOT_SERVING; its executor counts as lost only later."""


class SchedulerService:
    """The scheduler without its RPCs. All its parts use the clock of time.monotonic."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.metrics = Telemetry(has_vllm_names=settings.vllm_metric_names)
        self.core = StepScheduler(settings.core)
        self.sender: SpanSender | None = None
        self.spans: Spans | None = None
        if settings.otel:
            self.sender, self.spans = _spans(settings.otel_step_share)
            self.metrics.registry.register(self.sender)
        self.draining = False
        self.settled = asyncio.Event()
        """Set but while a new request would be refused for a model that may yet be loaded."""
        self._fault: Fault | None = None  # that was logged last
        self.started_at = time.monotonic()
        self._generation, self._drawn = time.time_ns() // 1_000_000, secrets.token_hex(16)  # of the directory
        self.rates = Rates(self.started_at)
        self._wake, wake_drafts, self._wake_tick = Wake(), Wake(), Wake()
        wake = self._wake
        self.text = TextPool(settings.text_limits)
        self.wanted = WantedAdapters(settings.adapters)
        self.pool = ExecutorPool(
            settings.executor,
            settings.executor_security,
            settings.timing,
            settings.request_limits,
            self.text,
            changed=self._executors_changed,
            instance=settings.instance_name,
            tool_format=settings.tool_format,
            adapters=self.wanted,
            model_name=settings.model_name,
        )
        self.drafts = DraftPool(
            settings.draft_executor,
            settings.executor_security,
            settings.timing,
            self._model,
            changed=wake_drafts.set,
            instance=f"{settings.instance_name}#draft" if settings.instance_name else "",
        )
        self.grammars = GrammarChecks(lambda: self.pool.active)
        self.streams = StreamRegistry(self.core, self.metrics, time.monotonic, wake.set)
        self.directory = LiveDirectory(self._listing) if settings.advertise else None
        self.adapters = AdapterAdmin(self.core, self.pool, self.wanted, self.streams.request_ended)
        self._draft_loop = DraftLoop(self.core, self.drafts, self.metrics, wake_drafts, wake.set)
        self._loop = Loop(
            self.core, self.pool, self._draft_loop, self.streams, self.metrics, wake, spans=self.spans
        )

    async def run(self, show_health: Callable[[bool], Awaitable[None]]) -> None:
        """Serve until cancelled, or until a bug raises an exception; then end all live requests.

        `show_health` is called with `healthy` at least every TICK_S: also at each heartbeat of an executor,
        and when one is ready or lost.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_endless(self.text.run()), name="tokenizers")
                group.create_task(_endless(self.pool.run()), name="executors")
                group.create_task(_endless(self._loop.run()), name="loop")
                if self.drafts.links:
                    group.create_task(_endless(self.drafts.run()), name="draft executors")
                    group.create_task(_endless(self._draft_loop.run()), name="draft loop")
                if self.directory is not None and self.settings.peer:
                    peers = Peers(self.settings.peer, self.settings.peer_security, self.directory)
                    group.create_task(_endless(peers.run()), name="peers")
                group.create_task(_endless(self._tick(show_health)), name="tick")
        finally:
            self.draining = True
            self.adapters.close()
            stopped = ServiceError(ErrorReason.INTERNAL, "the scheduler has stopped")
            self.streams.cancel_all(stopped, stopped)

    @property
    def state(self) -> ServiceState:
        """How a new request is treated, as of the executors' last heartbeats."""
        if self.draining:
            return ServiceState.DRAINING
        if self.pool.served is None or self.core.capacity is None:
            return ServiceState.LOADING
        if not self.ready_executors:
            return ServiceState.NO_EXECUTOR
        return ServiceState.SERVING if self.core.fault is None else ServiceState.DEGRADED

    @property
    def ready_executors(self) -> int:
        """Number of executors that can take new sequences now."""
        return sum(link.ready and not link.draining for link in self.pool.links)

    @property
    def healthy(self) -> bool:
        """Whether a request sent now would get tokens: the server's health."""
        active = self.pool.active
        served = {ServiceState.SERVING}
        if self.settings.degraded_health == "serving":
            served.add(ServiceState.DEGRADED)
        if self.state not in served or active is None or not active.ready:
            return False
        return self.core.connected and active.step_age_s < STUCK_STEP_S

    @property
    def executors(self) -> list[ExecutorView]:
        """All executors, with the draft executors last."""
        pool, drafts = self.pool, self.drafts
        return [link.view(active=link is pool.active) for link in pool.links] + [
            link.view(active=link is drafts.active, draft=True) for link in drafts.links
        ]

    def drafting_warnings(self, wish: DraftingWish, caller: Identity) -> tuple[str, ...]:
        """The warning for a new request that only the draft executor drafts for, while none is ready.

        Its text gives the reasons to administrators.
        """
        drafts = self.drafts
        if wish.drafters != {DraftSource.EXECUTOR} or drafts.ready:
            return ()
        details = ", ".join(f"{link.address}: {link.detail}" for link in drafts.links)
        why = f" ({details})" if caller.admin else ""
        warning = f"speculation.drafter: no draft executor is ready, nothing is drafted until one is{why}"
        return (warning.encode()[:MAX_WARNING_BYTES].decode(errors="ignore"),)

    def served(self, caller: Identity) -> Served:
        """The served model and its tokenizer.

        Raises ServiceError if no executor has been ready yet; its text gives the reasons to administrators.
        """
        if self.pool.served is None and (failure := self.pool.failure):
            why = failure if caller.admin else "the executor's log says why"
            raise ServiceError(ErrorReason.NOT_READY, f"the model can't be loaded: {why}")
        if self.pool.served is None:
            details = ", ".join(f"{link.address}: {link.detail}" for link in self.pool.links)
            why = f" ({details})" if caller.admin else ""
            raise ServiceError(ErrorReason.NOT_READY, f"no executor yet{why}", retry_after_s=RETRY_AFTER_S)
        return self.pool.served

    def served_for_request(self, caller: Identity) -> Served:
        """The served model, for a new request. Raises ServiceError as `served` does, and while draining."""
        if self.draining:
            raise ServiceError(ErrorReason.DRAINING, "draining", retry_after_s=RETRY_AFTER_S)
        return self.served(caller)

    async def close_sessions(self) -> None:
        """Close the scheduler's sessions on all executors, which frees their pages at once."""
        await asyncio.gather(self.pool.close_sessions(), self.drafts.close_sessions())
        if self.sender is not None:
            await asyncio.to_thread(self.sender.close)

    async def drain(self, timeout_s: float, force: asyncio.Event) -> None:
        """Refuse new requests from now on, and wait until the live ones have ended.

        After `timeout_s`, or when `force` is set, those that are left end with SHUTTING_DOWN.
        """
        self.draining = True
        log.info("draining", live=len(self.streams), timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while len(self.streams) and not force.is_set() and (left := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.05)):
                    await force.wait()
        if len(self.streams):
            log.warning("ending live requests", live=len(self.streams))
            why = "the scheduler is shutting down"
            reason = ErrorReason.SHUTTING_DOWN
            self.streams.cancel_all(
                ServiceError(reason, why), ServiceError(reason, why, retry_after_s=RETRY_AFTER_S)
            )

    def _executors_changed(self) -> None:
        self._wake.set()
        self._wake_tick.set()

    def _listing(self) -> Listing:
        """What the directory says of this scheduler."""
        settings, model, core = self.settings, self._model(), self.core.snapshot()
        return Listing(
            address=settings.advertise,
            tls_name=settings.advertised_tls_name,
            model=model.name if model else "",
            model_fingerprint=model.fingerprints.model if model else b"",
            adapters=tuple(adapter.name for adapter in self.wanted.served),
            state=self.state,
            load=Load(
                running=core.running,
                waiting=core.waiting,
                seats=core.max_sequences,
                uncomputed_tokens=core.uncomputed_tokens,
                predicted_wait_ms=int(self.core.newcomers_wait_s * 1000),
            ),
            generation=self._generation,
            instance=self._drawn,
        ).bounded()

    def _model(self) -> ServedModel | None:
        return None if self.pool.served is None else self.pool.served.model

    def _tell_fault(self) -> None:
        """Log and count when the watchdog finds something, or nothing any more."""
        fault = self.core.fault
        if fault is not None and self._fault is None:
            reason = fault.reason.name.lower()
            log.error("degraded: the queue waits for what is there", reason=reason, detail=fault.detail)
        elif fault is None and self._fault is not None:
            log.info("no longer degraded")
        self._fault = fault
        self.metrics.degraded.set(fault is not None)

    async def _tick(self, show_health: Callable[[bool], Awaitable[None]]) -> None:
        while True:
            self.streams.cancel_stalled(self.settings.stall_timeout_s)
            snapshot = self.core.snapshot()
            model, capacity = self._model(), self.core.capacity
            self.metrics.genai.model = model.name if model else ""
            self.metrics.show(
                snapshot,
                self.core.shares(MAX_IDENTITIES),
                self.core.waiting_by_reason(),
                adapter_slots=capacity.max_adapter_slots if capacity else 0,
            )
            wanted, uses = self.wanted, self.core.adapter_use()
            self.metrics.adapters.show(wanted.served, wanted.requests, uses, wanted.loads, wanted.unloads)
            self._tell_fault()
            self.rates.observe(snapshot.counters, time.monotonic())
            if self.directory is not None:
                self.directory.refresh()
            for link in (*self.pool.links, *self.drafts.links):
                self.metrics.executor_ready.labels(link.address).set(link.ready)
            await show_health(self.healthy)
            if self.state is not ServiceState.LOADING or self.pool.failure:
                self.settled.set()
            else:
                self.settled.clear()
            await self._wake_tick.wait(TICK_S)  # or until an executor is ready or lost, or at a heartbeat


def _spans(step_share: float) -> tuple[SpanSender, Spans]:
    """What records spans. Imports OpenTelemetry."""
    from service_kit.otlp import SpanSender

    from scheduler_service.spans import Spans

    sender = SpanSender("paceline-scheduler")
    return sender, Spans(sender.provider, step_share)


async def _endless(work: Coroutine[object, object, None]) -> None:
    """Await work that must end only when its task is cancelled. Raises RuntimeError if it ends otherwise.

    A task group ignores a task that returns, or that raises CancelledError without having been cancelled.
    """
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    raise RuntimeError("a part of the scheduler has ended")
