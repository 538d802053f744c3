"""A session's identity and its step counter, shared by the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.executor.v1 import executor_pb2 as pb


@dataclass(slots=True)
class Session:
    """An open session: names it in every step, and numbers its steps from 1.

    A step's number is used up when the executor accepted the step, whatever became of its rows.
    A step that was refused whole was not accepted: take its number back from `last_step_id`.
    """

    id: int
    epoch: int
    lease_ms: int
    max_in_flight: int
    last_step_id: int = 0

    @classmethod
    def opened(cls, reply: pb.OpenSessionResponse) -> Session:
        """The session that OpenSession made."""
        return cls(reply.session_id, reply.epoch, reply.lease_ms, reply.max_in_flight)

    def header(self) -> pb.StepHeader:
        """The header of the next step."""
        self.last_step_id += 1
        return pb.StepHeader(session_id=self.id, step_id=self.last_step_id, epoch=self.epoch)

    def step(
        self,
        *,
        ops: Iterable[pb.Op] = (),
        rows: pb.Rows | None = None,
        openings: Iterable[pb.Opening] = (),
    ) -> pb.Step:
        """The next step."""
        return pb.Step(header=self.header(), ops=ops, rows=rows, openings=openings)
