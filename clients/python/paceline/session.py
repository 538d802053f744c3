"""An executor session: its id and its step counter, for the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from paceline import errors
from paceline.executor.v1 import executor_pb2 as pb


class _StepReply(Protocol):
    """A reply that holds a StepResult."""

    @property
    def result(self) -> pb.StepResult: ...
    def HasField(self, field_name: Literal["result"]) -> bool: ...  # noqa: N802  # protobuf's name


_AnyStepReply = TypeVar("_AnyStepReply", bound=_StepReply)


def step_result(reply: _AnyStepReply) -> pb.StepResult:
    """The StepResult of an OK reply. Raises InternalError if it has none."""
    if not reply.HasField("result"):
        raise errors.incomplete("the reply to the step has no result")
    return reply.result


@dataclass(slots=True)
class Session:
    """An open session. Builds its steps with headers that name the session and number the steps from 1.

    A step that the executor accepted has used its number, even if all of its rows failed. A step that
    was refused as a whole has not: decrement `last_step_id` before the next step.
    """

    id: int
    epoch: int
    lease_ms: int
    max_in_flight: int
    last_step_id: int = 0

    @classmethod
    def opened(cls, reply: pb.OpenSessionResponse) -> Session:
        """The session in an OpenSession reply."""
        return cls(reply.session_id, reply.epoch, reply.lease_ms, reply.max_in_flight)

    def header(self) -> pb.StepHeader:
        """The header of the next step; increments `last_step_id`."""
        self.last_step_id += 1
        return pb.StepHeader(session_id=self.id, step_id=self.last_step_id, epoch=self.epoch)

    def step(
        self,
        *,
        ops: Iterable[pb.Op] = (),
        rows: pb.Rows | None = None,
        openings: Iterable[pb.Opening] = (),
    ) -> pb.Step:
        """The next step of the session; increments `last_step_id`."""
        return pb.Step(header=self.header(), ops=ops, rows=rows, openings=openings)
