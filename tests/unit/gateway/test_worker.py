"""What the gateway gets from its worker: streams, refusals, the model, the tokenizer, the load."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb

from scheduler_service.core.snapshot import Snapshot, Totals
from scheduler_service.errors import ErrorReason, ServiceError, invalid
from scheduler_service.gateway.archive import CHUNK_BYTES, in_chunks, tokenizer_archive
from scheduler_service.gateway.callers import GATEWAY, GatewayCallers
from scheduler_service.gateway.codec.info import worker_loads, worker_model
from scheduler_service.gateway.servicer import WorkerServicer
from scheduler_service.link.pool import Served
from scheduler_service.model import ServiceState, TokenizerSource
from scheduler_service.streams.stream import RequestStream
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import MODEL
from tests.unit.scheduler_shell.stream_harness import LETTERS, StreamHarness

METHODS = [method.name for method in worker_pb.DESCRIPTOR.services_by_name["VllmEngine"].methods]


class CallContext:
    """Of one call, by a process of this user."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write(self, message: Any) -> None:
        self.written.append(message)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    def time_remaining(self) -> None:
        return None


def a_call() -> Any:
    """The context of a call."""
    return CallContext()


class Door:
    """In the place of the public API's servicer: opens a stream that the test feeds, or refuses."""

    def __init__(self, stream: RequestStream | None = None, error: ServiceError | None = None) -> None:
        self.stream, self.error = stream, error

    async def open_stream(self, request: object, caller: object, context: object) -> RequestStream:
        assert caller is GATEWAY
        if self.error is not None:
            raise self.error
        assert self.stream is not None
        return self.stream

    async def refused(self, caller: object, error: ServiceError) -> None:
        assert caller is GATEWAY


def worker(
    service: Any = None, door: Any = None, *, owner: int | None = None, name: str = ""
) -> WorkerServicer:
    """One whose callers belong to user `owner`; None: to whom is not asked."""
    callers = GatewayCallers(own_user_only=owner is not None, owner=lambda peer, port: owner)
    used: Any = door or Door()
    return WorkerServicer(service, used, callers, name)


async def answers(
    harness: StreamHarness, stream: RequestStream, *, streams: bool, steps: Sequence[list[int]]
) -> list[Any]:
    """The messages of a call, with the tokens of each step delivered after those before were taken."""
    context = a_call()
    service = SimpleNamespace(streams=harness.streams, metrics=harness.metrics)
    request = worker_pb.GenerateRequest(stream=streams)
    call = asyncio.ensure_future(worker(service, Door(stream)).Generate(request, context))
    for tokens in steps:
        harness.step(tokens)
        for _ in range(3):
            await asyncio.sleep(0)
    await call
    return context.written


async def test_a_stream_has_a_chunk_for_each_delta_and_then_its_end() -> None:
    harness = StreamHarness()
    stream = harness.admit(caller=GATEWAY, max_tokens=3)
    *chunks, end = await answers(harness, stream, streams=True, steps=[[7], [8], [9]])
    assert [list(one.chunk.token_ids) for one in chunks] == [[7], [8], [9]]
    assert {one.chunk.completion_tokens for one in chunks} == {1}
    assert {one.chunk.prompt_tokens for one in chunks} == {2}
    complete = end.complete
    assert list(complete.output_ids) == [7, 8, 9]
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 2, 3)
    assert complete.WhichOneof("matched_stop") is None


async def test_without_streaming_there_is_one_message_for_each_completion() -> None:
    harness = StreamHarness()
    stream = harness.admit(caller=GATEWAY, max_tokens=2, n=2)
    written = await answers(harness, stream, streams=False, steps=[[7, 8]] * 6)
    assert sorted(one.complete.index for one in written) == [0, 1]
    assert {len(one.complete.output_ids) for one in written} == {2}


async def test_a_stop_string_ends_a_completion_and_is_named() -> None:
    harness = StreamHarness()
    a, b, c = LETTERS
    stream = harness.admit(caller=GATEWAY, text=True, max_tokens=10, strings=["bc"])
    *_, end = await answers(harness, stream, streams=True, steps=[[a], [b], [c]])
    assert (end.complete.finish_reason, end.complete.matched_stop_str) == ("stop", "bc")
    assert list(end.complete.output_ids) == [a, b, c]


async def test_a_stop_token_is_named_and_an_end_token_is_not() -> None:
    for stop_ids, sampled, matched in (([9], 9, 9), ([], 0, None)):
        harness = StreamHarness()
        stream = harness.admit(caller=GATEWAY, max_tokens=10, token_ids=stop_ids)
        *_, end = await answers(harness, stream, streams=True, steps=[[sampled]])
        assert end.complete.finish_reason == "stop"
        assert (end.complete.matched_token_id or None) == matched


async def test_an_aborted_request_ends_its_call_and_frees_its_place() -> None:
    harness = StreamHarness()
    stream = harness.admit("r", caller=GATEWAY, max_tokens=10)
    service: Any = SimpleNamespace(streams=harness.streams, metrics=harness.metrics)
    servicer, context = worker(service, Door(stream)), a_call()
    call = asyncio.ensure_future(servicer.Generate(worker_pb.GenerateRequest(stream=True), context))
    await asyncio.sleep(0)
    harness.step([7])
    await servicer.Abort(worker_pb.AbortRequest(request_ids=["r", "unknown"]), context)
    with raises(ErrorReason.ABORTED):
        await call
    assert not len(harness.streams)


async def test_an_error_names_the_field_as_the_gateways_clients_know_it() -> None:
    door = Door(error=invalid("stop.max_tokens", "is too large"))
    with raises(ErrorReason.INVALID_REQUEST, match=r"^max_tokens: is too large"):
        await worker(None, door).Generate(worker_pb.GenerateRequest(), a_call())


@pytest.mark.parametrize("method", METHODS)
async def test_no_method_serves_a_process_of_another_user(method: str) -> None:
    service: Any = SimpleNamespace()  # whoever used it would fail
    servicer, context = worker(service, None, owner=12345), a_call()
    with raises(ErrorReason.PERMISSION):
        await getattr(servicer, method)(SimpleNamespace(), context)
    with raises(ErrorReason.PERMISSION):
        await servicer.admit(context)
    assert not context.written


@pytest.mark.parametrize("method", ["SubscribeKvEvents", "FlushCache", "StartProfile", "StopProfile"])
async def test_what_is_not_offered_is_refused_with_a_word(method: str) -> None:
    with raises(ErrorReason.UNSUPPORTED, match="Paceline does not offer it"):
        await getattr(worker(), method)(None, a_call())


async def test_health_is_the_schedulers_own() -> None:
    for healthy, state in ((True, ServiceState.SERVING), (False, ServiceState.NO_EXECUTOR)):
        service: Any = SimpleNamespace(healthy=healthy, state=state)
        reply = await worker(service).HealthCheck(worker_pb.HealthCheckRequest(), a_call())
        assert (reply.healthy, reply.message) == (healthy, state.value)


def test_the_model_has_the_name_given_and_no_path_that_is_looked_up_elsewhere() -> None:
    info = worker_model(MODEL, "my/model", 40)
    assert info.served_model_name == "my/model"
    assert info.model_path.startswith("/")
    assert (info.max_context_length, info.vocab_size, list(info.eos_token_ids)) == (40, 100, [0])
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.5, "top_k": 7.0}


def test_pages_that_the_prefix_cache_alone_holds_count_as_free() -> None:
    snapshot = Snapshot(
        executor=True,
        running=2,
        waiting=3,
        waiting_tokens=50,
        uncomputed_tokens=60,
        page_size=16,
        max_sequences=4,
        in_flight=1,
        total_pages=100,
        free_pages=10,
        evictable_pages=40,
        step_s=0.1,
        step_rows=2.0,
        counters=Totals(prompt_tokens=200, cached_tokens=50),
    )
    [load] = worker_loads("1", snapshot, 12.5).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 3, 5)
    assert (load.token_usage, load.num_used_tokens, load.max_total_num_tokens) == (0.5, 800, 1600)
    assert (load.gen_throughput, load.cache_hit_rate, load.utilization) == (12.5, 0.25, 0.5)


FILES = TokenizerSource(
    tokenizer_json=b"{}" * 100_000,
    chat_template="{{ x }}",
    eos_token="</s>",
    add_bos=True,
    eos_token_ids=frozenset({2}),
)


def test_the_archive_has_the_files_of_a_model_directory_and_equal_files_make_equal_archives() -> None:
    archive = tokenizer_archive(FILES, "llama", [2])
    assert archive == tokenizer_archive(FILES, "llama", [2])
    with zipfile.ZipFile(io.BytesIO(archive)) as unpacked:
        assert unpacked.read("tokenizer.json") == FILES.tokenizer_json
        config = json.loads(unpacked.read("tokenizer_config.json"))
        assert config == {"add_bos_token": True, "chat_template": "{{ x }}", "eos_token": "</s>"}
        assert json.loads(unpacked.read("generation_config.json")) == {"eos_token_id": [2]}


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_the_last_chunk_alone_has_the_digest_of_all(size: int) -> None:
    archive = bytes(size)
    *others, last = in_chunks(archive)
    assert b"".join(data for data, _ in (*others, last)) == archive
    assert all(not digest and len(data) == CHUNK_BYTES for data, digest in others)
    assert last[1] == hashlib.sha256(archive).hexdigest()


async def test_the_tokenizer_comes_in_chunks_and_a_model_without_one_is_not_found() -> None:
    for files, chunks in ((FILES, 1), (None, 0)):
        served = Served(MODEL, None, files)
        service: Any = SimpleNamespace(served=lambda caller, served=served: served)
        context = a_call()
        call = worker(service).GetTokenizer(common_pb2.GetTokenizerRequest(), context)
        if files is None:
            with raises(ErrorReason.TOKENIZER_NOT_FOUND):
                await call
        else:
            await call
        assert len(context.written) == chunks
