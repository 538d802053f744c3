"""Metrics under the names of conventions: each has the figure that the convention means."""

from __future__ import annotations

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.snapshot import AdapterUse
from scheduler_service.metrics.metrics import RENAMED, Telemetry
from scheduler_service.model import ServedAdapter
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request
from tests.unit.scheduler_shell.stream_harness import CALLER, LETTERS, StreamHarness

GENERATION = {"gen_ai_operation_name": "text_completion", "gen_ai_provider_name": "paceline"}


def samples(metrics: Telemetry) -> list[tuple[str, dict[str, str], float]]:
    """All samples of a scrape: name, labels, value."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return [(one.name, dict(one.labels), one.value) for family in families for one in family.samples]


def value(metrics: Telemetry, name: str, **labels: str) -> float:
    [found] = [v for n, has, v in samples(metrics) if n == name and labels.items() <= has.items()]
    return found


async def test_a_request_has_its_duration_first_token_and_time_per_further_token() -> None:
    harness = StreamHarness()
    harness.metrics.genai.model = "m"
    stream = harness.admit(max_tokens=3)
    for harness.now in (1.0, 1.5, 2.5):
        harness.step()
    harness.now = 4.0  # its last message is written
    harness.streams.close(stream)
    labels = GENERATION | {"gen_ai_response_model": "m"}
    name = "gen_ai_server"
    assert value(harness.metrics, f"{name}_request_duration_seconds_sum", **labels, error_type="") == 4.0
    assert value(harness.metrics, f"{name}_time_to_first_token_seconds_sum", **labels) == 1.0
    assert value(harness.metrics, f"{name}_time_per_output_token_seconds_sum", **labels) == 0.75


async def test_a_request_that_fails_has_its_error_and_no_token_times() -> None:
    harness = StreamHarness()
    for id_ in ("left", "aborted"):
        stream = harness.admit(id_, max_tokens=9)
        harness.step()
        if id_ == "aborted":
            harness.streams.abort(id_, CALLER.name, "aborted")
        harness.streams.close(stream)
    for error in ("CLIENT_LEFT", "ABORTED"):
        assert value(harness.metrics, "gen_ai_server_request_duration_seconds_count", error_type=error) == 1
    assert not [n for n, *_ in samples(harness.metrics) if n.startswith("gen_ai_server_time")]


async def test_what_another_scheduler_began_has_no_token_times_here() -> None:
    harness = StreamHarness()
    continued = pb.ContinuedCompletion(index=0, token_ids=[LETTERS[0]])
    stream = harness.admit(continued=continued, max_tokens=3, ignore_eos=True)
    while harness.step() is not None:
        pass
    assert stream.ended
    harness.streams.close(stream)
    assert value(harness.metrics, "gen_ai_server_request_duration_seconds_count", error_type="") == 1
    assert not [n for n, *_ in samples(harness.metrics) if n.startswith("gen_ai_server_time")]


def test_counters_whose_unit_was_abbreviated_have_both_names_and_one_value() -> None:
    harness, metrics = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=1)), Telemetry()
    for i in range(4):
        harness.add(make_request(f"r{i}"))
    harness.run()
    metrics.show(harness.core.snapshot(), ())
    for former, spelled in RENAMED.items():
        now = value(metrics, f"paceline_scheduler_{spelled}_total")
        assert value(metrics, f"paceline_scheduler_{former}_total") == now
    assert value(metrics, "paceline_scheduler_wait_seconds_total") > 0


@pytest.mark.parametrize("has_them", [False, True])
def test_vllms_names_have_what_they_mean_there_if_they_are_asked_for(*, has_them: bool) -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=1))
    metrics = Telemetry(has_vllm_names=has_them)
    metrics.genai.model = "m"
    for i in range(3):
        harness.add(make_request(f"r{i}", range(40)))
    harness.step()
    metrics.first_token_s.observe(0.2)
    metrics.inter_token_s.add(0.03, 5)
    sql, chess = (ServedAdapter(name, name, name.encode(), 4, 1) for name in ("sql", "chess"))
    uses = {b"sql": AdapterUse(running=1), b"chess": AdapterUse(waiting=2)}
    metrics.adapters.show([sql, chess], {"sql": 1, "chess": 2}, uses, loads=2, unloads=0)
    snapshot = harness.core.snapshot()
    metrics.show(snapshot, (), adapter_slots=4)
    found = [n for n, *_ in samples(metrics) if n.startswith("vllm:")]
    if not has_them:
        assert not found
        return
    model = {"model_name": "m"}
    assert value(metrics, "vllm:num_requests_running", **model) == 1
    assert value(metrics, "vllm:num_requests_waiting", **model) == 2
    used = 1 - (snapshot.free_pages + snapshot.evictable_pages) / snapshot.total_pages
    assert value(metrics, "vllm:kv_cache_usage_perc", **model) == pytest.approx(used)
    pages = {"block_size": str(CAPACITY.page_size), "num_gpu_blocks": str(CAPACITY.total_pages)}
    assert value(metrics, "vllm:cache_config_info", **model, **pages) == 1
    adapters = {"max_lora": "4", "running_lora_adapters": "sql", "waiting_lora_adapters": "chess"}
    assert value(metrics, "vllm:lora_requests_info", **adapters) > 1e9
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", **model, le="0.25") == 1
    for name in ("inter_token_latency", "time_per_output_token"):
        assert value(metrics, f"vllm:{name}_seconds_count", **model) == 5


def test_the_process_and_its_version_are_there() -> None:
    metrics = Telemetry()
    metrics.show(StepScheduler(CoreConfig()).snapshot(), ())
    assert value(metrics, "process_resident_memory_bytes") > 1 << 20
    assert value(metrics, "paceline_scheduler_build_info") == 1
