"""A model with a classification head through both processes: its scores by every door, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from paceline import Client, ExecutorClient, errors
from paceline.cli.app import app
from paceline.executor.v1 import executor_pb2
from transformers import AutoTokenizer, PreTrainedModel, Qwen3Config
from typer.testing import CliRunner

from scheduler_service.rpc.codec.rerank import INSTRUCTION, JUDGE
from tests.model.test_classification_heads import classifier
from tests.model.test_embedding_directories import SIZES, write_tokenizer
from tests.model.tiny import save_random
from tests.support.openai_door import serving_door
from tests.support.processes import running

pytestmark = pytest.mark.long

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% if enable_thinking is false %}-{% endif %}{% endif %}"
)
QUERY, DOCUMENTS = "Why is the sky blue?", ["Grass is green.", "Air scatters blue light.", "", "naïve 日本語"]
UNAVAILABLE = "has a classification head in place of an output layer"


class Reranker:
    """A served model, its executor, and transformers' own."""

    def __init__(self, path: Path, labels: int) -> None:
        config = Qwen3Config(**(SIZES | {"max_position_embeddings": 1024}), head_dim=24)
        save_random(config, path / "base")
        self.theirs: PreTrainedModel = classifier(path / "base", tied=True, labels=labels)
        self.path = path / "head"
        self.theirs.save_pretrained(self.path)
        write_tokenizer(self.path, None, chat_template=TEMPLATE)
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.executor = self.scheduler = ""

    def scores(self, text: str) -> list[float]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        with torch.inference_mode():
            found: list[float] = self.theirs(torch.tensor([ids])).logits[0].tolist()
        return found

    def ranked(self) -> list[tuple[int, float]]:
        """The documents that are not empty, best first, by the prompt of Qwen3-Reranker."""
        found = []
        for index, document in enumerate(DOCUMENTS):
            user = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
            text = f"<s>system: {JUDGE}</s><s>user: {user}</s><s>assistant: -"
            if document:
                found.append((index, float(torch.sigmoid(torch.tensor(self.scores(text)[0])))))
        return sorted(found, key=lambda one: -one[1])


@pytest.fixture(scope="module", params=[1, 3])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reranker]:
    made = Reranker(tmp_path_factory.mktemp("model"), request.param)
    given = ["--backend", "torch", "--model", str(made.path), "--device", "cpu", "--threads", "1"]
    with running("executor_service", given, tmp_path_factory.mktemp("executor")) as executor:
        flags = ["--executor", executor.address]
        with running("scheduler_service", flags, tmp_path_factory.mktemp("scheduler")) as scheduler:
            made.executor, made.scheduler = executor.address, scheduler.address
            yield made


async def test_a_rerankers_scores_are_those_of_transformers_by_every_door(served: Reranker) -> None:
    labels = served.theirs.config.num_labels
    with Client(served.scheduler) as client:
        info = client.model_info()
        assert info.embedding_size == labels
        assert {"classifier", "embed"} <= set(info.capabilities)
        assert ("rerank" in info.capabilities) is (labels == 1)
        of_generate = {
            "continuation",
            "logprobs",
            "multiple_completions",
            "speculation",
            "tools",
            "reasoning",
        }
        assert of_generate.isdisjoint(info.capabilities)
        assert "score" not in info.capabilities
        texts = [text for text in DOCUMENTS if text]
        for text, vector in zip(texts, client.embed(texts).vectors, strict=True):
            assert vector == pytest.approx(served.scores(text), abs=1e-4)
        refusals = [
            lambda: client.complete("a", max_tokens=1),
            lambda: client.chat("a", max_tokens=1),
            lambda: client.score(["abc"]),
        ]
        for call in refusals:
            with pytest.raises(errors.Unsupported, match=UNAVAILABLE):
                call()
        if labels > 1:
            with pytest.raises(errors.Unsupported, match="head has 3 scores, and Rerank needs one"):
                client.rerank(QUERY, DOCUMENTS)
            return
        with pytest.raises(errors.Unsupported, match="method: "):
            client.rerank(QUERY, DOCUMENTS, method="likelihood")
        by_sdk = client.rerank(QUERY, DOCUMENTS).results
    want = served.ranked()
    assert [one.index for one in by_sdk] == [*(index for index, _ in want), 2]
    assert by_sdk[-1].empty
    assert [one.score for one in by_sdk[:-1]] == pytest.approx([score for _, score in want], abs=1e-4)
    async with serving_door(served.scheduler) as door:
        answer = await door.ask("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
        assert [(one["index"], one["relevance_score"]) for one in answer.json["results"]] == [
            (one.index, one.score) for one in by_sdk
        ]
        answer = await door.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert answer.status == 400
        assert UNAVAILABLE in answer.error["message"]


def test_doctor_asks_it_for_what_it_has(served: Reranker) -> None:
    result = CliRunner().invoke(app, ["doctor", served.scheduler, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["answered"]
    assert found["detail"].startswith("head answered in ")


def test_its_executor_offers_what_needs_no_output_layer(served: Reranker) -> None:
    with closing(ExecutorClient(served.executor)) as client:
        offered = set(client.get_info().capabilities)
    assert {executor_pb2.CAPABILITY_CLASSIFIER, executor_pb2.CAPABILITY_POOLING} <= offered
    lacking = ("VERIFY", "MULTI_STEP", "TOP_K", "FULL_LOGITS", "MASKS", "GRAMMAR", "SCORES")
    assert offered.isdisjoint(executor_pb2.Capability.Value(f"CAPABILITY_{name}") for name in lacking)
