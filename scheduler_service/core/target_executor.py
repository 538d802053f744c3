"""The executor that computes the sequences, as the core sees it: its limits, pages and steps in flight."""

from __future__ import annotations

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import IllegalEvent
from scheduler_service.core.in_flight import SentStep, StepsInFlight
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.step import Capacity, StepAnswer

RETRY_S = 0.02
"""After the executor was short of pages, sequences or slots: seconds until more of these is asked of it."""

_SMOOTHING = 0.1  # weight of the newest step in a moving average


class TargetExecutor:
    """The connected executor, or the last connected one: its capacity stays known when it is lost."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self.capacity: Capacity | None = None  # None before the first executor
        self.limits: JointLimits | None = None  # likewise
        self.connected = False
        self.retiring = False  # connected, and takes no openings any more
        self.in_flight = StepsInFlight()
        self.free_pages = 0  # from the last reply; evictable ones not counted
        self.evictable_pages = 0
        self._retry_at = 0.0
        self._slots_retry_at = 0.0
        self._answered_at = 0.0
        self._step_s = 0.0  # moving average of a step's time on the device; 0 before the first

    def ready(self, capacity: Capacity, now: float) -> JointLimits:
        """An executor that holds none of our caches connected. Raises IllegalEvent while one is connected."""
        if self.connected:
            raise IllegalEvent("an executor is connected: it must be lost before another is ready")
        self.capacity = capacity
        self.limits = JointLimits.of(self._config, capacity)
        self.connected = True
        self.free_pages, self.evictable_pages = capacity.total_pages, 0
        self._retry_at = self._slots_retry_at = now
        self._step_s = 0.0
        return self.limits

    def retire(self) -> None:
        """The executor takes no openings any more. Does nothing while none is connected."""
        self.retiring = self.connected

    def lost(self) -> None:
        """The executor is gone; the steps in flight will never be answered."""
        self.connected = self.retiring = False
        self.in_flight.clear()

    @property
    def opens_caches(self) -> bool:
        """An executor is connected and takes openings."""
        return self.connected and not self.retiring

    @property
    def max_steps(self) -> int:
        """How many steps may be in flight now; 0: no executor is connected."""
        return self.limits.steps(self._step_s) if self.connected and self.limits else 0

    @property
    def takes_a_step(self) -> bool:
        """Fewer steps are in flight than there may be."""
        return len(self.in_flight) < self.max_steps

    @property
    def is_kept_busy(self) -> bool:
        """Enough steps are in flight for the device: a further one is for its rows' sake."""
        return self.limits is not None and len(self.in_flight) >= self.limits.in_flight

    def pace(self, now: float) -> tuple[float, float]:
        """Seconds that a step takes, as a moving average, and since the oldest step in flight was sent.

        0.0: no step was answered; none is in flight.
        """
        oldest = next(iter(self.in_flight), None)
        return self._step_s, 0.0 if oldest is None else now - oldest.figures.sent_at

    @property
    def unpromised_pages(self) -> int:
        """Available pages that the steps in flight can't take."""
        return max(0, self.free_pages + self.evictable_pages - self.in_flight.pages)

    def may_be_asked(self, now: float) -> bool:
        """The executor takes openings, and was not short of anything within the last RETRY_S seconds."""
        return now >= self._retry_at and not self.retiring

    def may_take_slots(self, now: float) -> bool:
        """Whether to ask for a slot for one more adapter: the executor lacked none within the last RETRY_S.

        Slots that it lacks are other clients': those of our own sequences are counted.
        """
        return now >= self._slots_retry_at

    def retry_at(self, now: float) -> float | None:
        """When an idle executor that was short of something is asked again; None: no such time is set."""
        if not self.opens_caches or self.in_flight:
            return None
        return min((at for at in (self._retry_at, self._slots_retry_at) if at > now), default=None)

    def answer(self, result: StepAnswer, now: float) -> tuple[SentStep, float, float]:
        """Take the answer to the oldest step in flight: that step, when it began, and the seconds it took.

        A step that was sent while another one was computed begins with the answer to that one. Raises
        UnknownStep, and has changed nothing then.
        """
        step = self.in_flight.take(result, self.limits.page_size if self.limits else 1)
        self.free_pages, self.evictable_pages = result.free_pages, result.evictable_pages
        weight = _SMOOTHING if self._step_s else 1.0
        self._step_s += weight * (result.compute_s - self._step_s)
        began_at = max(step.figures.sent_at, self._answered_at)
        self._answered_at = now
        return step, began_at, now - began_at

    def check_integrity(self, running: SequenceQueue) -> None:
        """Compare the steps in flight with the running sequences. Raises AssertionError."""
        for sequence in running:
            rows = self.in_flight.rows_of(sequence.cache_id)
            assert sequence.in_flight == rows, f"{sequence.key} awaits {sequence.in_flight} of {rows} answers"
            most = rows + self.in_flight.drafts_of(sequence.cache_id)
            assert sequence.ahead == most, f"{sequence.key} awaits {sequence.ahead} of {most} tokens"
        assert self.connected or not self.in_flight, "a step is in flight, and no executor is connected"

    def was_short(self, now: float) -> None:
        """The executor had no room for something: ask for nothing more for RETRY_S seconds."""
        self._retry_at = now + RETRY_S

    def was_short_of_slots(self, now: float) -> None:
        """The executor had no slot for one more adapter: ask for none for RETRY_S seconds."""
        self._slots_retry_at = now + RETRY_S
