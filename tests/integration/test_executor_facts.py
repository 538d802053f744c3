"""What an executor of a model says of it over a raw stub."""

from __future__ import annotations

import time
from collections.abc import Iterator

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
    write_model(path / "model", vocab_size=512, max_position_embeddings=4096, **WINDOW)
    (path / "model" / "README.md").write_text("---\nlicense: mit\nversion: 2\nlanguage: [en]\n---\n")
    arguments = ["--backend", "torch", "--model", str(path / "model"), "--threads", "1", "--pages", "300"]
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
