"""What an executor of a model says of it over a raw stub."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from paceline.channel import Link, Security, open_channel
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc

from tests.support.processes import running
from tests.unit.executor.model_files import write_model

WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc.ExecutorServiceStub]:
    path = tmp_path_factory.mktemp("facts")
    write_model(path / "model", vocab_size=2048, max_position_embeddings=4096, **WINDOW)
    (path / "model" / "README.md").write_text("---\nlicense: mit\nversion: 2\nlanguage: [en]\n---\n")
    arguments = ["--backend", "torch", "--model", str(path / "model"), "--threads", "1", "--pages", "600"]
    arguments += ["--max-step-tokens", "4096"]
    with (
        running("executor_service", arguments, path) as process,
        open_channel(process.address, Link.PRIVATE, Security()) as channel,
    ):
        yield rpc.ExecutorServiceStub(channel)


def test_the_model_its_attention_and_its_ranks_are_told(stub: rpc.ExecutorServiceStub) -> None:
    model = stub.GetInfo(pb.GetInfoRequest()).model
    assert list(model.attention_kinds) == [pb.ATTENTION_KIND_FULL, pb.ATTENTION_KIND_SLIDING_WINDOW]
    assert model.attention_window == 5
    assert (model.version, model.license, dict(model.metadata)) == ("2", "mit", {"language": "en"})
    assert (model.ranks, model.parallelism) == (1, pb.PARALLELISM_NONE)
    assert time.time() - 600 < model.loaded_at_s <= time.time()


def test_memory_is_told_by_use(stub: rpc.ExecutorServiceStub) -> None:
    before = stub.GetStatus(pb.GetStatusRequest()).memory_bytes
    assert before.keys() >= {"weights", "kv", "activations", "overhead", "process"}
    assert before["weights"] == stub.GetInfo(pb.GetInfoRequest()).model.weight_bytes > 0
    tokens = pb.ForwardInput(tokens=[1] * 2000)
    stub.Forward(pb.ForwardRequest(inputs=[tokens], outputs=[pb.FORWARD_OUTPUT_EMBEDDING]))
    after = stub.GetStatus(pb.GetStatusRequest()).memory_bytes
    assert after["activations"] >= max(2000 * 16 * 4, before["activations"] + 1)
    explained = after["weights"] + after["activations"] + after["overhead"]
    assert explained <= after["process"] <= explained + after["kv"]


def test_the_running_step_is_told(stub: rpc.ExecutorServiceStub) -> None:
    """Status is asked while steps run, again until each kind of them was seen once."""
    expected = {
        (pb.STEP_KIND_PREFILL, 2, 3000),
        (pb.STEP_KIND_DECODE, 2, 128),
        (pb.STEP_KIND_FORWARD, 2, 4000),
    }
    seen = set()
    idle = pb.GetStatusRequest()
    assert not stub.GetStatus(idle).HasField("running_step")
    for round_ in range(50):
        ids = [2 * round_ + 1, 2 * round_ + 2]
        prompts = [pb.Opening(cache_id=n, tokens=[n] * 1500) for n in ids]
        rows = pb.Rows(cache_ids=ids, kv_lengths=[1500, 1500], steps=[64, 64])
        inputs = [pb.ForwardInput(tokens=[1] * 2000)] * 2
        calls: list[tuple[Any, Any]] = [
            (stub.BatchPrefill, pb.BatchPrefillRequest(step=pb.Step(openings=prompts))),
            (stub.BatchDecode, pb.BatchDecodeRequest(step=pb.Step(rows=rows))),
            (stub.ReleaseCache, pb.ReleaseCacheRequest(release=pb.Release(cache_ids=ids))),
            (stub.Forward, pb.ForwardRequest(inputs=inputs, outputs=[pb.FORWARD_OUTPUT_EMBEDDING])),
        ]
        for call, request in calls:
            future = call.future(request)
            while not future.done():
                if (status := stub.GetStatus(idle)).HasField("running_step"):
                    running = status.running_step
                    seen.add((running.kind, running.rows, running.tokens))
            future.result()
        if seen >= expected:
            break
    assert seen == expected
    assert not stub.GetStatus(idle).HasField("running_step")


def test_logits_of_any_length_come_in_parts(stub: rpc.ExecutorServiceStub) -> None:
    tokens = [n % 2000 for n in range(3000)]
    logits = pb.FORWARD_OUTPUT_LOGITS

    def part(length: int, first: int, count: int) -> np.ndarray:
        item = pb.ForwardInput(tokens=tokens[:length])
        request = pb.ForwardRequest(inputs=[item], outputs=[logits], first_token=first, token_count=count)
        (result,) = stub.Forward(request).results
        return np.frombuffer(result.logits.data, "<f4").reshape(tuple(result.logits.shape))

    with pytest.raises(grpc.RpcError) as caught:
        part(3000, 0, 0)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_full_logits_bytes" in str(caught.value.details())
    parts = [part(3000, first, 1500) for first in (0, 1500)]
    assert [len(each) for each in parts] == [1500, 1500]
    assert np.array_equal(part(1600, 1500, 0), parts[1][:100])


def test_masks_and_positions_are_taken(stub: rpc.ExecutorServiceStub) -> None:
    assert pb.CAPABILITY_FORWARD_MASKS in stub.GetInfo(pb.GetInfoRequest()).capabilities
    item = pb.ForwardInput(tokens=[5, 6, 7], position_ids=[0, 9, 10], attention_mask=b"\1\0\1")
    request = pb.ForwardRequest(inputs=[item], outputs=[pb.FORWARD_OUTPUT_HIDDEN])
    (result,) = stub.Forward(request).results
    assert list(result.hidden.shape) == [3, 16]
    request.inputs[0].attention_mask = b"\0\1\1"
    with pytest.raises(grpc.RpcError) as caught:
        stub.Forward(request)
    assert "inputs[0].attention_mask: token 0 sees none" in str(caught.value.details())
