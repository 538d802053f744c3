"""Makes the next step of the target and of the draft executor: decides about drafts, fills it, sends it."""

from __future__ import annotations

from scheduler_service.core.admission import Admission
from scheduler_service.core.drafting.speculator import Speculator
from scheduler_service.core.expiry import Expiry
from scheduler_service.core.forecast import Forecast
from scheduler_service.core.in_flight import can_go_ahead
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.planner import StepBuilder
from scheduler_service.core.registry import Registry
from scheduler_service.core.schedule import Schedule
from scheduler_service.core.sequence_pool import SequencePool
from scheduler_service.core.states import SequenceState
from scheduler_service.core.step import PlannedStep
from scheduler_service.core.step_log import StepFigures
from scheduler_service.core.target_executor import TargetExecutor
from scheduler_service.core.waiting.reasons import WaitReason

FOR_PAGES = frozenset({WaitReason.PAGES, WaitReason.PAGES_IN_FLIGHT, WaitReason.RUNNING_PAGES})
"""Reasons that releases end."""


class Dispatcher:
    """Sends steps: what is planned here is in flight when it returns."""

    def __init__(
        self,
        pool: SequencePool,
        registry: Registry,
        target: TargetExecutor,
        expiry: Expiry,
        admission: Admission,
        forecast: Forecast,
        speculator: Speculator,
    ) -> None:
        self._pool = pool
        self._registry = registry
        self._target = target
        self._expiry = expiry
        self._admission = admission
        self._forecast = forecast
        self._speculator = speculator

    def next_step(self, now: float) -> PlannedStep | None:
        """Send the target's next step; None if it takes none now, or there is nothing to send."""
        target, pool = self._target, self._pool
        if not target.takes_a_step or target.limits is None:
            self.note_no_step()
            return None
        alone = bool(pool.isolated)
        if alone and target.in_flight:
            self._block(WaitReason.ALONE)
            return None
        if not alone:
            self._decide(now)
            if self._splits_rows(target.limits):
                self.note_no_step()
                return None
        may_ask, withheld = target.may_be_asked(now), WaitReason.NONE
        if not may_ask:
            withheld = WaitReason.NO_EXECUTOR if target.retiring else WaitReason.EXECUTOR_SHORT
        pages = target.unpromised_pages
        builder = StepBuilder(
            pool,
            target.limits,
            pages,
            target.in_flight,
            self._admission,
            lambda late: self._expiry.give_up(late, now),
            self._speculator.step_time,
            now,
            may_ask=may_ask,
            may_take_slots=target.may_take_slots(now),
        )
        if alone:
            builder.fill_alone(pool.isolated[0])
        elif not pool.speculating:
            builder.fill()
        elif not self._speculator.holds(pool.running, self._forecast.step_s):
            builder.fill()
            if not builder.stalled:
                self._speculator.attach(builder.schedule, builder.reserve, target.limits.page_size)
        else:
            withheld = WaitReason.DRAFT_EXECUTOR
        pool.waits.pass_by(builder.passed)
        if withheld:
            self._block(withheld)
        else:
            pool.waits.block(builder.head, builder.reason, builder.needed, builder.available)
        return self._send(builder.schedule, pages, now)

    def _splits_rows(self, limits: JointLimits) -> bool:
        """Whether a step beside those that keep the device busy would have only a part of the rows that one
        can have after the next answer: it costs as much as that one, and hides no round trip from a sequence.

        Not so if a row goes on from an unanswered one, a prompt has more chunks, or the queue fills a step.
        """
        pool = self._pool
        if not self._target.is_kept_busy or pool.queue.queued_tokens >= limits.step_tokens:
            return False
        decoding = SequenceState.RUNNING
        return not any(can_go_ahead(s) if s.in_flight else s.state is not decoding for s in pool.running)

    def note_no_step(self) -> None:
        """No step can be planned now: record what that means for the sequences that wait."""
        if not self._target.connected:
            self._block(WaitReason.NO_EXECUTOR)
        elif self._pool.waits.head is None and len(self._pool.queue):
            self._pool.waits.await_plan(self._pool.queue.first_sequence())

    def _block(self, reason: WaitReason) -> None:
        """Whatever is queued waits for this."""
        first = self._pool.queue.first_sequence()
        if first is None:
            reason = WaitReason.NONE
        elif reason is WaitReason.EXECUTOR_SHORT and first.is_behind:
            reason = WaitReason.GRAMMAR_BEHIND
        self._pool.waits.block(first, reason)

    def next_draft_step(self, now: float) -> PlannedStep | None:
        """Send the draft executor's next step; None if none is connected, or there is nothing to send."""
        if not self._speculator.connected:
            return None
        self._decide(now)
        return self._speculator.plan_draft(self._pool.running, now, alone=bool(self._pool.isolated))

    def _decide(self, now: float) -> None:
        """Decide which sequences get drafts for their next row; none while a sequence runs alone."""
        target = self._target
        if self._pool.isolated or not self._pool.speculating:
            return
        if target.connected and target.limits and target.capacity:
            self._speculator.decide(
                self._pool.running,
                target.capacity.max_drafts,
                self._forecast.step_s,
                now,
                ahead=target.max_steps > 1,
                drafts_ahead=target.limits.in_flight > 1,
                sends=target.takes_a_step,
            )

    def _must_release(self, now: float) -> bool:
        """Whether a step is to be sent for releases alone: something waits for them, or they have waited."""
        pool = self._pool
        if not pool.releases or self._target.in_flight:
            return bool(pool.releases) and pool.waits.reason in FOR_PAGES
        # Running sequences have a row in any step that can have one: those that are there wait for pages.
        return bool(len(pool.running) or len(pool.queue)) or now >= pool.release_at

    def next_at(self, now: float) -> float | None:
        """When a step is due that no event brings about, on the caller's clock; None: there is none."""
        target, pool = self._target, self._pool
        times = [target.retry_at(now)] if len(self._registry) else []
        if pool.releases and target.connected and not target.in_flight:
            times.append(pool.release_at)
        return min((at for at in times if at is not None), default=None)

    def _send(self, schedule: Schedule, pages: int, now: float) -> PlannedStep | None:
        if schedule.empty and not self._must_release(now):
            return None
        releases = self._pool.take_releases()
        for opening in schedule.openings:
            self._registry.start(opening.sequence.live, now)
            self._speculator.opened(opening.sequence)
        for fork in schedule.forks:
            self._speculator.opened(fork.sequence)
        figures = StepFigures(now, self._forecast.step_s, pages, self._pool.waits.reason)
        return self._target.in_flight.send(schedule, releases, pages - schedule.pages_left, figures)
