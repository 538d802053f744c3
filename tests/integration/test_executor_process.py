"""An executor process on loopback: start and end, streams, health, status, authentication."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline.channel import Link, Security, open_channel
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc

from tests.support.checkout import ROOT, environment
from tests.support.processes import ServiceProcess, executor, running

MODULE = "executor_service"
ORACLE = ["--backend", "oracle"]
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


class Client:
    def __init__(self, process: ServiceProcess, security: Security | None = None) -> None:
        self.channel = open_channel(process.address, Link.PRIVATE, security or Security())
        self.stub = rpc.ExecutorServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def serving(self) -> int:
        return self.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status

    def status(self) -> pb.GetStatusResponse:
        return self.stub.GetStatus(pb.GetStatusRequest(), timeout=5)

    def open(self, cache_id: int, tokens: list[int]) -> pb.StepResult:
        step = pb.Step(openings=[pb.Opening(cache_id=cache_id, tokens=tokens)])
        return self.stub.Prefill(pb.PrefillRequest(step=step), timeout=30).result

    def drain_until_the_deadline(self) -> int:
        """It is answered 50 ms before: a machine that stands still just then has another try."""
        for _ in range(5):
            try:
                return self.stub.Drain(pb.DrainRequest(), timeout=0.5).sequences
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
        raise AssertionError("no answer before the deadline")

    def release(self, *cache_ids: int) -> int:
        request = pb.ReleaseCacheRequest(release=pb.Release(cache_ids=cache_ids))
        return self.stub.ReleaseCache(request, timeout=5).result.ops[0].released


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    arguments = [*ORACLE, "--metrics-port", "0", "--reflection"]
    with running(MODULE, arguments, tmp_path_factory.mktemp("executor")) as process:
        yield process


@pytest.fixture
def client(process: ServiceProcess) -> Iterator[Client]:
    client = Client(process)
    with client.channel:
        yield client


def row(cache_id: int, kv_length: int) -> pb.Rows:
    return pb.Rows(cache_ids=[cache_id], kv_lengths=[kv_length])


def test_a_row_error_of_a_single_row_rpc_is_its_status(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.Decode(pb.DecodeRequest(step=pb.Step(rows=row(999, 1))), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "rows.cache_ids[0]" in str(caught.value.details())


def test_a_refused_step_leaves_the_stream_alive(client: Client) -> None:
    client.open(1, [1, 2, 3])
    steps = [
        pb.Step(rows=row(1, 3)),
        pb.Step(rows=pb.Rows(cache_ids=[1])),
        pb.Step(header=pb.StepHeader(epoch=1), rows=row(1, 4)),
        pb.Step(rows=row(1, 4)),
    ]
    requests = (pb.StreamUnifiedDecodeRequest(step=step) for step in steps)
    replies = list(client.stub.StreamUnifiedDecode(requests, timeout=30))
    assert [reply.error.code for reply in replies] == [0, 3, 9, 0]
    assert [list(reply.result.rows.kv_lengths) for reply in replies] == [[4], [], [], [5]]
    client.release(1)


def test_many_steps_in_flight_are_answered_in_order(client: Client) -> None:
    session = client.stub.OpenSession(pb.OpenSessionRequest()).session_id
    opening = pb.Opening(cache_id=1, tokens=[1, 2, 3])
    steps = [pb.Step(header=pb.StepHeader(session_id=session, step_id=1), openings=[opening])]
    steps += [
        pb.Step(header=pb.StepHeader(session_id=session, step_id=i + 2), rows=row(1, 3 + i))
        for i in range(100)
    ]
    requests = (pb.StreamUnifiedDecodeRequest(step=step) for step in steps)
    replies = list(client.stub.StreamUnifiedDecode(requests, timeout=30))
    assert [reply.result.step_id for reply in replies] == list(range(1, 102))
    assert [reply.result.rows.kv_lengths[0] for reply in replies] == list(range(3, 104))
    assert client.stub.CloseSession(pb.CloseSessionRequest(session_id=session)).released == 1


def test_a_cancelled_stream_releases_no_cache_and_its_steps_can_be_replayed(client: Client) -> None:
    session = client.stub.OpenSession(pb.OpenSessionRequest()).session_id
    step = pb.Step(
        header=pb.StepHeader(session_id=session, step_id=1), openings=[pb.Opening(cache_id=1, tokens=[1, 2])]
    )
    stream = client.stub.StreamUnifiedDecode(iter([pb.StreamUnifiedDecodeRequest(step=step)]))
    first = next(stream)
    stream.cancel()
    again = client.stub.UnifiedDecode(pb.UnifiedDecodeRequest(step=step), timeout=5)
    assert again.result == first.result
    client.stub.CloseSession(pb.CloseSessionRequest(session_id=session))


def test_metrics_are_served_on_their_port(client: Client, process: ServiceProcess) -> None:
    client.open(2, [1, 2, 3])
    client.release(2)
    with pytest.raises(grpc.RpcError):
        client.stub.Decode(pb.DecodeRequest(step=pb.Step(rows=row(2, 3))), timeout=5)
    port = next(
        line.split('"metrics_port": ')[1].split(",")[0]
        for line in process.log.splitlines()
        if "metrics_port" in line
    )
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    for name in (
        'kv_pages{state="owned"} 0.0',
        "steps_total",
        "prefix_hit_tokens_total",
        "evictions_total",
        "sequences 0.0",
        "sessions_expired_total",
        'refused_total{reason="cache"}',
        "step_seconds_bucket",
        "step_rows_bucket",
    ):
        assert f"paceline_executor_{name}" in text


def test_the_log_names_no_tokens(client: Client, process: ServiceProcess) -> None:
    client.open(3, [201, 202, 203])
    client.release(3)
    assert "201, 202" not in process.log


def test_the_status_counts_what_was_done(client: Client) -> None:
    before = client.status()
    client.open(4, [7] * 40)
    status = client.status()
    assert status.state == pb.EXECUTOR_STATE_SERVING
    assert (status.sequences, status.steps - before.steps, status.rows - before.rows) == (1, 1, 1)
    assert status.tokens_computed - before.tokens_computed == 40
    cache = status.cache
    assert (cache.owned_pages, cache.free_pages + cache.cached_pages + cache.owned_pages) == (
        3,
        cache.total_pages,
    )
    client.release(4)


def test_warmup_touches_no_cache(client: Client) -> None:
    before = client.status().cache
    client.stub.Warmup(pb.WarmupRequest(), timeout=30)
    assert client.status().cache == before


def test_health_and_status_answer_while_a_long_step_runs(tmp_path: Path) -> None:
    with running(MODULE, [*ORACLE, "--step-ms", "4000", "--stuck-after-s", "1"], tmp_path) as process:
        client = Client(process)
        step = pb.Step(openings=[pb.Opening(cache_id=1, tokens=[1])])
        answer = client.stub.Prefill.future(pb.PrefillRequest(step=step))
        seen = set()
        while NOT_SERVING not in seen:
            assert not answer.done(), "a step beyond stuck-after-s is NOT_SERVING"
            seen.add(client.serving())
            assert client.status().state == pb.EXECUTOR_STATE_SERVING
        assert not answer.done(), "the event loop waited for the device"
        assert SERVING in seen
        watch = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert any(response.status == SERVING for response in watch), "and SERVING once it is done"
        watch.cancel()


def test_sigterm_waits_for_the_caches_and_exits_with_status_0(tmp_path: Path) -> None:
    with running(MODULE, ORACLE, tmp_path) as process:
        client = Client(process)
        client.open(1, [1, 2])
        watch = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        process.signal(signal.SIGTERM)
        assert any(response.status == NOT_SERVING for response in watch)
        watch.cancel()
        assert client.status().state == pb.EXECUTOR_STATE_DRAINING
        with pytest.raises(grpc.RpcError) as caught:
            client.open(2, [1])
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        result = client.stub.Decode(pb.DecodeRequest(step=pb.Step(rows=row(1, 2))), timeout=5).result
        assert result.rows.kv_lengths[0] == 3
        client.release(1)
        assert process.wait(10) == 0
        assert '"abandoned_sequences": 0' in process.log


def test_the_drain_timeout_ends_the_wait(tmp_path: Path) -> None:
    with running(MODULE, [*ORACLE, "--drain-timeout-s", "0.1"], tmp_path) as process:
        Client(process).open(1, [1, 2])
        assert process.terminate(10) == 0
        assert '"abandoned_sequences": 1' in process.log


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running(MODULE, ORACLE, tmp_path) as process:
        client = Client(process)
        client.open(1, [1, 2])
        watch = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        process.signal(signal.SIGTERM)
        assert any(response.status == NOT_SERVING for response in watch)
        watch.cancel()
        process.signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_drain_refuses_openings_and_answers_when_all_is_released(tmp_path: Path) -> None:
    with running(MODULE, ORACLE, tmp_path) as process:
        client = Client(process)
        client.open(1, [1, 2])
        assert client.stub.Drain(pb.DrainRequest(timeout_ms=50), timeout=5).sequences == 1
        assert client.drain_until_the_deadline() == 1
        waiting = client.stub.Drain.future(pb.DrainRequest(), timeout=20)
        client.release(1)
        assert waiting.result().sequences == 0


def test_a_fault_of_the_device_thread_ends_the_process(tmp_path: Path) -> None:
    with running(MODULE, [*ORACLE, "--exit-on-token", "99"], tmp_path) as process:
        client = Client(process)
        with pytest.raises(grpc.RpcError):
            client.open(1, [99])
        assert process.wait(10) != 0


def test_a_model_that_can_not_be_served_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    arguments = [*ORACLE, "--kv-memory", "1"]
    process = executor(*arguments, directory=tmp_path)
    try:
        assert process.wait(20) == 78
        assert "--kv-memory 1 does not hold two KV pages of" in process.log
    finally:
        process.kill()


def test_bad_flags_are_named() -> None:
    command = [sys.executable, "-m", MODULE, *ORACLE, "--port", "99999"]
    bad = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=30, check=False
    )
    assert bad.returncode == 2
    assert "--port:" in bad.stderr


def test_a_token_is_demanded_of_all_but_health_checks(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with running(MODULE, [*ORACLE, "--auth-token-file", str(token)], tmp_path / "run") as process:
        client = Client(process)
        assert client.serving() == SERVING
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as caught:
                client.stub.GetInfo(pb.GetInfoRequest(), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError) as caught:
                list(client.stub.StreamUnifiedDecode(iter([]), metadata=metadata))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (
            client.stub.GetInfo(pb.GetInfoRequest(), metadata=Security(token="secret").metadata).backend
            == "oracle"
        )


def test_the_paged_attention_backend_serves_too(tmp_path: Path) -> None:
    with running(MODULE, ["--backend", "paged-attention"], tmp_path) as process:
        client = Client(process)
        tokens = list(client.open(1, [1, 2, 3]).rows.tokens)
        assert len(tokens) == 1
        assert client.stub.GetInfo(pb.GetInfoRequest()).backend == "paged-attention"
