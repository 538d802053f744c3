"""Encodes what the gateway asks about the model, the server and its load."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb

from scheduler_service.core.snapshot import Snapshot
from scheduler_service.model import ServedModel


def worker_model(model: ServedModel, name: str, max_request_tokens: int) -> worker_pb.GetModelInfoResponse:
    """The model, called `name` by clients of the gateway."""
    context = min(model.context_length, max_request_tokens or model.context_length)
    return worker_pb.GetModelInfoResponse(
        # The gateway looks for a path that is not absolute on the internet.
        model_path=f"/paceline/{name}",
        served_model_name=name,
        is_generation=True,
        max_context_length=context,
        max_req_input_len=context - 1,
        vocab_size=model.vocab_size,
        model_type=model.architecture,
        eos_token_ids=sorted(model.eos_token_ids),
        default_sampling_params_json=json.dumps(dict(model.generation_defaults)),
    )


def worker_server(
    model: ServedModel, snapshot: Snapshot, live: int, uptime_s: float
) -> worker_pb.GetServerInfoResponse:
    """The server; `live`: number of live requests."""
    return worker_pb.GetServerInfoResponse(
        server_type="vllm-grpc",  # the protocol's name, by which the gateway knows it
        active_requests=live,
        uptime_seconds=uptime_s,
        data_parallel_size=1,
        max_num_seqs=snapshot.max_sequences,
        block_size=snapshot.page_size,
        model_dtype=model.dtype,
        constrained_decoding_start="first_token",
    )


def worker_loads(
    version: str, snapshot: Snapshot, completion_tokens_per_s: float
) -> worker_pb.GetLoadsResponse:
    """The load. Pages that only the prefix cache holds count as free."""
    used = snapshot.total_pages - snapshot.free_pages - snapshot.evictable_pages
    usage = used / snapshot.total_pages if snapshot.total_pages else 0.0
    counters = snapshot.counters
    hits = counters.cached_tokens / counters.prompt_tokens if counters.prompt_tokens else 0.0
    seats = snapshot.max_sequences
    load = worker_pb.SchedulerLoad(
        num_running_reqs=snapshot.running,
        num_waiting_reqs=snapshot.waiting,
        num_total_reqs=snapshot.running + snapshot.waiting,
        num_used_tokens=used * snapshot.page_size,
        max_total_num_tokens=snapshot.total_pages * snapshot.page_size,
        token_usage=usage,
        gen_throughput=completion_tokens_per_s,
        cache_hit_rate=hits,
        utilization=snapshot.running / seats if seats else 0.0,
        max_running_requests=seats,
        num_waiting_uncached_tokens=snapshot.waiting_tokens,
    )
    now = datetime.now(UTC).isoformat()
    return worker_pb.GetLoadsResponse(timestamp=now, version=version, dp_rank_count=1, loads=[load])
