"""Drain: nothing new is opened, what is open goes on, and health says so. Ends the executor's use."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge


def test_draining_refuses_openings_and_lets_live_caches_go_on(drainable: Executor) -> None:
    draw, judge = Draw(drainable, "drain"), Judge(drainable, exact=False)
    session = drainable.open_session()
    sequence = session.open(draw.prompt())
    assert drainable.call("Drain", pb.DrainRequest(timeout_ms=1)).sequences == 1
    assert drainable.status().state == pb.EXECUTOR_STATE_DRAINING

    stub = health_pb2_grpc.HealthStub(drainable.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10, metadata=drainable.metadata)
    assert any(reply.status == health_pb2.HealthCheckResponse.NOT_SERVING for reply in watch)

    row, opening = sequence.row(), session.opening(draw.prompt())
    reply = session.step([row], [opening])
    assert reply.rows[1].code is grpc.StatusCode.UNAVAILABLE
    sequence.took(row, reply.rows[0])
    sequence.decode(2)
    judge.check(sequence)

    waiting = drainable.stub.Drain.future(pb.DrainRequest(), timeout=30, metadata=drainable.metadata)
    assert session.release(sequence) == 1
    assert waiting.result().sequences == 0
    session.close()
