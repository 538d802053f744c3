"""GetStatus, Warmup and health: live figures, and nothing disturbed."""

from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge


def test_counters_move_with_the_work(executor: Executor, session: Session, draw: Draw) -> None:
    before = executor.status()
    prompt = draw.prompt()
    session.open(prompt).decode(3)
    after = executor.status()
    assert after.steps - before.steps == 4
    assert after.rows - before.rows == 4
    assert after.tokens_computed - before.tokens_computed == len(prompt) + 3
    assert after.tokens_sampled - before.tokens_sampled == 4
    assert after.sequences - before.sequences == 1
    assert after.compute_s > before.compute_s
    assert after.uptime_s > before.uptime_s


def test_a_prefix_hit_is_not_computed(executor: Executor, session: Session, draw: Draw) -> None:
    prompt = draw.prompt()
    session.open(prompt)
    before = executor.status().tokens_computed
    again = session.open(prompt)
    assert executor.status().tokens_computed - before == len(prompt) - again.hit


def test_a_serving_executor_says_so(executor: Executor) -> None:
    status = executor.status()
    assert status.state == pb.EXECUTOR_STATE_SERVING
    assert status.queued_steps == 0
    assert status.memory_bytes, "memory is reported"
    assert all(value >= 0 for value in status.memory_bytes.values())


def test_sessions_are_counted(executor: Executor) -> None:
    before = executor.status().sessions
    session = executor.open_session()
    assert executor.status().sessions == before + 1
    session.close()
    assert executor.status().sessions == before


def test_replies_carry_their_time(session: Session, draw: Draw) -> None:
    opening = session.opening(draw.prompt())
    raw = session.step(openings=[opening]).raw
    assert raw.compute_us > 0


def test_warming_up_changes_no_content(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    before = executor.status().cache
    executor.call("Warmup", pb.WarmupRequest())
    assert executor.status().cache == before
    sequence.decode(4)
    judge.check(sequence)


def test_health_is_serving(executor: Executor) -> None:
    stub = health_pb2_grpc.HealthStub(executor.channel)
    for service in ("", "paceline.executor.v1.ExecutorService"):
        request = health_pb2.HealthCheckRequest(service=service)
        reply = stub.Check(request, timeout=10, metadata=executor.metadata)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING, service
