"""An engine over the fake backend, spoken to in plain rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from executor_service.backends.base import Backend
from executor_service.cache.session import Leases
from executor_service.contract.limits import Limits
from executor_service.contract.plan import (
    Fork,
    Op,
    Opening,
    OpResult,
    OutputMode,
    Reason,
    Release,
    Row,
    RowResult,
    Sampling,
    StepPlan,
    StepResult,
    Truncate,
)
from executor_service.steps.engine import Engine
from tests.support.engine_steps import BegunStep, begin, execute, planned
from tests.unit.executor.fakes import EMPTY, FakeBackend, limits

EPOCH = 77


class Clock:
    """A lease clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Harness:
    """One engine; its methods are single-item steps of session 0 unless told otherwise."""

    def __init__(
        self,
        bounds: Limits | None = None,
        backend: Backend | None = None,
        replay_clock: Callable[[], float] | None = None,
    ) -> None:
        bounds = bounds or limits()
        self.backend: Any = backend or FakeBackend(bounds.context_length)
        self.backend.allocate(bounds.total_pages + 1, bounds.page_size)
        self.clock = Clock()
        self.engine = Engine(self.backend, bounds, EPOCH, Leases(default_s=10.0), self.clock, replay_clock)

    def step(
        self,
        *items: Row | Opening,
        ops: tuple[Op, ...] = (),
        session: int = 0,
        step_id: int = 0,
        digest: bytes = b"",
        epoch: int = 0,
    ) -> StepResult:
        """A step; rows are put before openings."""
        what = plan(*items, ops=ops, session=session, step_id=step_id, digest=digest, epoch=epoch)
        result = execute(self.engine, what)
        self.engine.store.check()
        return result

    def begin(
        self, *items: Row | Opening, ops: tuple[Op, ...] = (), session: int = 0, step_id: int = 0
    ) -> BegunStep:
        """A step that may be under way for a while."""
        step = begin(self.engine, plan(*items, ops=ops, session=session, step_id=step_id))
        self.engine.store.check()
        return step

    def row(self, item: Row | Opening, session: int = 0) -> RowResult:
        """One row's answer."""
        return self.step(item, session=session).rows[0]

    def op(self, op: Op, session: int = 0) -> OpResult:
        """One op's answer."""
        return self.step(ops=(op,), session=session).ops[0]

    def snapshot(self) -> object:
        """Everything that a refused row must leave alone."""
        cache = self.engine.store.pages
        return (
            cache.free,
            cache.cached,
            [
                (
                    session.id,
                    cache_id,
                    sequence.length,
                    sequence.known,
                    sequence.sampled,
                    sequence.ids[: sequence.known].tolist(),
                    sequence.table.pages().tolist(),
                )
                for session in self.engine.store.sessions
                for cache_id, sequence in session.caches.items()
            ],
        )


def plan(
    *items: Row | Opening,
    ops: tuple[Op, ...] = (),
    session: int = 0,
    step_id: int = 0,
    digest: bytes = b"",
    epoch: int = 0,
) -> StepPlan:
    """A plan; rows are put before openings."""
    rows = tuple(item for item in items if isinstance(item, Row))
    openings = tuple(item for item in items if isinstance(item, Opening))
    return StepPlan(session, step_id, epoch, digest, ops, planned(rows), openings)


def opening(
    cache_id: int,
    tokens: list[int],
    limit: int = 0,
    *,
    seed: int = 0,
    output: OutputMode = OutputMode.SAMPLE,
    top_k: int = 0,
    salt: bytes = b"",
    stops: tuple[int, ...] = (),
    logprobs: int | None = None,
) -> Opening:
    sampling = Sampling(seed=seed, stop_token_ids=stops, logprobs=logprobs)
    return Opening(cache_id, np.array(tokens, np.int32), len(tokens), limit, sampling, output, top_k, salt)


def row(
    cache_id: int,
    kv_length: int,
    tokens: list[int] | None = None,
    drafts: list[int] | None = None,
    limit: int = 0,
    steps: int = 1,
    output: OutputMode = OutputMode.SAMPLE,
    top_k: int = 0,
) -> Row:
    return Row(
        cache_id,
        kv_length,
        np.array(tokens, np.int32) if tokens else EMPTY,
        np.array(drafts, np.int32) if drafts else EMPTY,
        limit,
        steps,
        output,
        top_k,
    )


def fork(source_id: int, cache_id: int, length: int, seed: int = 0) -> Fork:
    return Fork(source_id, cache_id, length, Sampling(seed=seed))


__all__ = ["EPOCH", "Clock", "Harness", "Reason", "Release", "Truncate", "fork", "opening", "plan", "row"]
