"""Which of several models are loaded next, and which are put away for them. Pure: time is passed in.

Models are loaded in the order in which calls began to wait for them, and none overtakes, so each gets its
turn. For one that does not fit, those that are not used go first, the least recently used one before the
others; then one that is in use, once it has had its turn: its live streams end, and its new calls wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline_router.models import ModelState

TURN_S = 10.0
"""Time that a loaded model that is in use has at least while others wait for its memory; as long as its load
took, if that is longer: so loads take at most half of the time."""
PAUSE_S = 1.0
"""A model is in use for so long after its last stream: a client's next request is often on its way."""
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0
"""Time in which a model that has failed is not loaded again: doubled each time."""
_HELD = (ModelState.LOADING, ModelState.SERVING, ModelState.DRAINING)


@dataclass(slots=True)
class LoadableModel:
    """A model, as far as its memory is concerned. Times are in seconds, of one clock."""

    stays: bool = False  # it is never put away for another
    keep_alive_s: float | None = None  # unused for so long, it is put away; None: only for another
    need: int | None = None  # bytes, from the beginning of its load on; None: unknown
    state: ModelState = ModelState.AVAILABLE
    busy: bool = False  # it has streams, or may have some that are not known yet
    load_at: float = 0.0  # the beginning of its last load
    loaded_at: float = 0.0
    used_at: float = 0.0  # the end of its last use
    retry_at: float = 0.0  # when one that has failed may be loaded again
    failures: int = 0  # since it last served

    def failed(self, now: float) -> None:
        """Record that the model could not be loaded, or kept running."""
        self.retry_at = now + min(FIRST_RETRY_S * 2.0**self.failures, LAST_RETRY_S)
        self.failures += 1

    @property
    def turn_ends_at(self) -> float:
        """Until when the model is not put away for another while it is in use."""
        return self.loaded_at + max(TURN_S, self.loaded_at - self.load_at)

    def serves(self, now: float) -> None:
        """Record that the model is loaded."""
        self.loaded_at = self.used_at = now
        self.failures = 0


@dataclass(slots=True)
class Moves:
    """What is to be done now. `again_at`: when to look again if nothing happens before."""

    load: list[str] = field(default_factory=list)
    put_away: list[str] = field(default_factory=list)
    waits: str = ""  # the model that others are put away for
    again_at: float | None = None

    def look_at(self, at: float) -> None:
        """Look again then, at the latest."""
        self.again_at = at if self.again_at is None else min(self.again_at, at)


def moves(models: Mapping[str, LoadableModel], wanted: Sequence[str], bound: int | None, now: float) -> Moves:
    """The moves at a time. `wanted`: names, longest waiting first. `bound`: bytes of all models together."""
    found = Moves()
    for name, one in models.items():
        if one.state is ModelState.FAILED and one.retry_at > now:
            found.look_at(one.retry_at)
        if one.state is ModelState.SERVING and not (one.busy or one.stays) and one.keep_alive_s is not None:
            if one.used_at + one.keep_alive_s <= now:
                found.put_away.append(name)
            else:
                found.look_at(one.used_at + one.keep_alive_s)
    held = sum(one.need or 0 for one in models.values() if one.state in _HELD)
    # One that stays is wanted by nobody's call: while it is the only one, a balancer sends none.
    lost = [name for name, one in models.items() if one.stays and one.state is ModelState.FAILED]
    for name in dict.fromkeys((*lost, *wanted)):
        one = models[name]
        if one.state in _HELD or (one.state is ModelState.FAILED and one.retry_at > now):
            continue
        if bound is not None and (short := held + (one.need or 0) - bound) > 0:
            if name not in wanted:  # nobody waits for it: it takes what nobody uses, if that is enough
                idle = {other: each for other, each in models.items() if not each.busy}
                if _freed_at_most(idle) >= short:
                    _make_room(short, idle, found, now)
                continue
            found.waits = name
            _make_room(short, models, found, now)
            break  # nobody overtakes it
        found.load.append(name)
        held += one.need or 0
    return found


def _freed_at_most(models: Mapping[str, LoadableModel]) -> int:
    """Bytes of those that can be put away, or are leaving."""
    return sum(
        one.need or 0
        for one in models.values()
        if one.state is ModelState.DRAINING or (one.state is ModelState.SERVING and not one.stays)
    )


def _make_room(short: int, models: Mapping[str, LoadableModel], found: Moves, now: float) -> None:
    """Add the models that are put away for one that lacks `short` bytes."""
    leaving = {name for name, one in models.items() if one.state is ModelState.DRAINING} | {*found.put_away}
    short -= sum(models[name].need or 0 for name in leaving)
    others = [
        (name, one) for name, one in models.items() if one.state is ModelState.SERVING and not one.stays
    ]
    for name, one in sorted(others, key=lambda other: (other[1].busy, other[1].used_at)):
        if short <= 0 or name in leaving:
            continue
        at = one.turn_ends_at if one.busy else min(one.turn_ends_at, one.used_at + PAUSE_S)
        if at > now:
            found.look_at(at)
            continue
        found.put_away.append(name)
        short -= one.need or 0
