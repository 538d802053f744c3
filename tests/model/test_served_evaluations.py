"""Scores, vectors and ranks through both processes are those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from paceline.cli.app import app
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from scheduler_service.rpc.codec.rerank import INSTRUCTION, JUDGE
from tests.model.default_model import default_model
from tests.model.tiny import save
from tests.support.processes import running
from tests.unit.docs.pages import PAGES, Page

pytestmark = pytest.mark.slow

VOCABULARY, CONTEXT = 211, 2048
CHUNKS = ("--prefill-chunk-tokens", "100", "--max-step-tokens", "192")


class ServedBeside:
    """A stub of a scheduler, and transformers' own of the same weights."""

    def __init__(self, address: str, theirs: PreTrainedModel) -> None:
        self.stub = rpc.SchedulerServiceStub(grpc.insecure_channel(address))
        self.theirs = theirs

    def scores(self, tokens: list[int], first: int = 1) -> NDArray[np.float64]:
        """Logprobs of tokens[first:]."""
        with torch.inference_mode():
            logits = self.theirs(torch.tensor([tokens])).logits[0, first - 1 : -1].double()
            found = logits.log_softmax(-1)[torch.arange(len(tokens) - first), torch.tensor(tokens[first:])]
            return np.asarray(found)

    def states(self, tokens: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return np.asarray(self.theirs.model(torch.tensor([tokens])).last_hidden_state[0])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBeside]:
    """In the layout of Qwen3-Embedding: saved without its output layer, which is tied."""
    path = tmp_path_factory.mktemp("model")
    theirs = save("qwen3", path)
    theirs.model.save_pretrained(path)
    assert "embed_tokens.weight" in load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    with served(path, tmp_path_factory) as address:
        yield ServedBeside(address, theirs)


@contextmanager
def served(model: Path, factory: pytest.TempPathFactory, *flags: str) -> Iterator[str]:
    """Both services, with this model; the scheduler's address."""
    given = ["--backend", "torch", "--model", str(model), "--device", "cpu", *flags]
    with running("executor_service", given, factory.mktemp("executor")) as executor:
        arguments = ["--executor", executor.address, *CHUNKS]
        with running("scheduler_service", arguments, factory.mktemp("scheduler")) as scheduler:
            yield scheduler.address


def ids(tokens: list[int]) -> pb.TokenIds:
    return pb.TokenIds(ids=tokens)


def test_200_texts_have_the_scores_of_transformers(tiny: ServedBeside) -> None:
    """Of 1 to 2,000 tokens, 10 in a call; half of them after prompts that several share."""
    rng = random.Random(5)
    worst = 0.0
    for call in range(20):
        shared = [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([40, 300]))]
        inputs, wholes = [], []
        for number in range(10):
            length = 1 if call == number else round(2000 ** rng.random())
            tokens = [rng.randrange(3, VOCABULARY) for _ in range(length)]
            if number % 2 and length < 1700:
                inputs.append(pb.ScoreInput(prompt_token_ids=ids(shared), token_ids=ids(tokens)))
                wholes.append((shared + tokens, len(shared)))
            else:
                inputs.append(pb.ScoreInput(token_ids=ids(tokens)))
                wholes.append((tokens, 1))
        reply = tiny.stub.Score(pb.ScoreRequest(inputs=inputs))
        for score, (tokens, first) in zip(reply.scores, wholes, strict=True):
            assert list(score.token_ids) == tokens[first:]
            found = [one.logprob for one in score.logprobs]
            assert len(found) == len(tokens) - first
            if found:
                worst = max(worst, float(np.abs(np.array(found) - tiny.scores(tokens, first)).max()))
    print(f"\nlargest difference of a score: {worst:.1e}")
    assert worst < 1e-3


@pytest.mark.parametrize("pooling", [pb.POOLING_LAST, pb.POOLING_MEAN])
def test_vectors_are_those_of_transformers(tiny: ServedBeside, pooling: pb.Pooling.ValueType) -> None:
    rng = random.Random(6)
    texts = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (1, 2, 17, 99, 100, 101, 700)]
    inputs = [pb.EmbedInput(token_ids=ids(tokens)) for tokens in texts]
    for _ in range(2):  # the second time the prefix cache has them
        reply = tiny.stub.Embed(pb.EmbedRequest(inputs=inputs, pooling=pooling))
        for embedding, tokens in zip(reply.embeddings, texts, strict=True):
            states = tiny.states(tokens)
            vector = states[-1] if pooling == pb.POOLING_LAST else states.mean(axis=0)
            assert np.allclose(embedding.values, vector / np.linalg.norm(vector), atol=1e-4)


def test_documents_are_ranked_as_transformers_ranks_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The default model, which was not trained for it, through its own template and tokenizer."""
    path = default_model()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    query = "What is the capital of France?"
    documents = [
        "Paris is the capital of France.",
        "The Loire flows into the Atlantic.",
        "France's capital, Paris, lies on the Seine, and has two million inhabitants.",
        "Berlin is the capital of Germany.",
        "Bread is made of flour.",
    ]
    with served(path, tmp_path_factory, "--dtype", "float32") as address:
        stub = ServedBeside(address, theirs).stub
        reply = stub.Rerank(pb.RerankRequest(query=query, documents=documents), timeout=600)
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    expected = []
    for index, document in enumerate(documents):
        user = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        chat = [{"role": "system", "content": JUDGE}, {"role": "user", "content": user}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt])).logits[0, -1].double()
        expected.append((float(torch.sigmoid(logits[yes] - logits[no])), index))
    expected.sort(key=lambda pair: (-pair[0], pair[1]))
    assert [one.index for one in reply.results] == [index for _, index in expected]
    assert [one.score for one in reply.results] == pytest.approx([score for score, _ in expected], abs=1e-3)


def test_what_the_pages_rank_is_ranked_right_by_the_default_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pages = {page.path.name: page for page in map(Page.read, PAGES)}
    with served(default_model(), tmp_path_factory) as address:
        for name in ("README.md", "evaluations.md"):
            [words] = [one for one in pages[name].block_commands() if "rerank" in one]
            result = CliRunner().invoke(app, [*words[1:], "-a", address])
            assert result.stdout.splitlines()[0].endswith("  Air scatters blue light."), result.output
