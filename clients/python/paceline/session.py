"""A session's identity and its step counter, shared by the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from paceline import errors
from paceline.executor.v1 import executor_pb2 as pb


class _StepReply(Protocol):
    """The reply of an RPC that is a step."""

    @property
    def result(self) -> pb.StepResult: ...
    def HasField(self, field_name: Literal["result"]) -> bool: ...  # noqa: N802  # protobuf's own


_AnyStepReply = TypeVar("_AnyStepReply", bound=_StepReply)


def step_result(reply: _AnyStepReply) -> pb.StepResult:
    """The result in an OK reply. Raises InternalError if there is none."""
    if not reply.HasField("result"):
        raise errors.incomplete("the step was answered without a result")
    return reply.result


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
