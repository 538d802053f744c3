"""Vectors of directories in the layout of sentence-transformers are its own, through every door."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from paceline import Client
from paceline.cli.app import app
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from tests.model.test_served_evaluations import served
from tests.model.tiny import save_random

pytestmark = pytest.mark.slow

SPECIAL = ["<pad>", "<s>", "</s>"]
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
TEXTS = ["Why is the sky blue?", " naïve 日本語 ", "a", "</s>b", "the quick brown fox " * 9]
TEMPLATE = processors.TemplateProcessing
BEGIN, END = ("<s>", 1), ("</s>", 2)


@dataclass(frozen=True)
class Case:
    """A directory: its post-processor, pooling, prompts."""

    post_processor: Any
    mode: str
    normalized: bool
    prompts: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    qwen: bool = True


CASES = {
    "none": Case(None, "lasttoken", normalized=True),
    "end": Case(TEMPLATE(single="$A </s>", special_tokens=[END]), "lasttoken", True, {"query": "Query: "}),
    "begin-end": Case(
        TEMPLATE(single="<s> $A </s>", special_tokens=[BEGIN, END]), "mean", normalized=False, qwen=False
    ),
    "pair": Case(
        TEMPLATE(single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[BEGIN, END]),
        "mean",
        True,
        {"query": "q ", "document": ""},
        "query",
    ),
    "byte-level": Case(
        processors.ByteLevel(), "cls", False, {"short": "", "long": "Given a text: "}, None, False
    ),
}


def write(path: Path, case: Case) -> None:
    """A tiny random model, its tokenizer without a chat template, and its modules."""
    kind = Qwen3Config(**SIZES, head_dim=24) if case.qwen else LlamaConfig(**SIZES)
    save_random(kind, path).model.save_pretrained(path)
    write_tokenizer(path, case.post_processor)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if case.normalized else [])]
    folders = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": at, "name": str(at), "path": folders[at], "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    write_json(path / "modules.json", modules)
    (path / "1_Pooling").mkdir()
    flags = {
        f"pooling_mode_{mode}": False for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    flag = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}.get(
        case.mode, "pooling_mode_lasttoken"
    )
    write_json(path / "1_Pooling" / "config.json", {"word_embedding_dimension": 64} | flags | {flag: True})
    write_json(
        path / "config_sentence_transformers.json",
        {"prompts": case.prompts, "default_prompt_name": case.default, "similarity_fn_name": "cosine"},
    )


def write_tokenizer(path: Path, post_processor: Any, **fields: str) -> None:
    """A tokenizer of bytes, and `fields` of its configuration."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: id_ for id_, piece in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    write_json(
        path / "tokenizer_config.json", names | {"tokenizer_class": "PreTrainedTokenizerFast"} | fields
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def by_grpc(address: str, prompt: dict[str, Any]) -> list[Sequence[float]]:
    inputs = [pb.EmbedInput(text=text) for text in TEXTS]
    with grpc.insecure_channel(address) as channel:
        reply = rpc.SchedulerServiceStub(channel).Embed(pb.EmbedRequest(inputs=inputs, **prompt), timeout=60)
    return [one.values for one in reply.embeddings]


def by_sdk(address: str, prompt: dict[str, str]) -> list[Sequence[float]]:
    names = {"prompt_text": "prompt", "prompt_name": "prompt_name"}
    with Client(address) as client:
        given: Any = {names[key]: value for key, value in prompt.items()}
        return list(client.embed(TEXTS, **given, timeout_s=60).vectors)


def by_cli(address: str, prompt: dict[str, str]) -> list[Sequence[float]]:
    flags = {"prompt_text": "--prompt", "prompt_name": "--prompt-name"}
    options = [word for key, value in prompt.items() for word in (flags[key], value)]
    result = CliRunner().invoke(app, ["embed", "--json", "-a", address, *options, *TEXTS])
    assert result.exit_code == 0, result.output
    return [json.loads(line)["embedding"] for line in result.stdout.splitlines()]


def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.filterwarnings("default")  # of the libraries that sentence-transformers brings
@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_sentence_transformers(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = pytest.importorskip("sentence_transformers")
    case = CASES[name]
    model = tmp_path / "model"
    write(model, case)
    theirs = library.SentenceTransformer(str(model), device="cpu")
    prompts: list[tuple[dict[str, str], dict[str, str]]] = [
        ({}, {}),
        ({"prompt_text": "Of "}, {"prompt": "Of "}),
    ]
    prompts += [({"prompt_name": one}, {"prompt_name": one}) for one in case.prompts]
    worst = 1.0
    with served(model, tmp_path_factory) as address:
        for ours, given in prompts:
            expected = np.asarray(theirs.encode(TEXTS, **given), np.float64)
            for ask in (by_grpc, by_sdk, by_cli):
                found = np.array(ask(address, ours), np.float64)
                assert found.shape == expected.shape
                worst = min(worst, *(cosine(a, b) for a, b in zip(found, expected, strict=True)))
                norms = np.linalg.norm(expected, axis=1)
                assert np.linalg.norm(found, axis=1) == pytest.approx(norms, rel=1e-4)
    print(f"\nsmallest cosine, {name}: {worst:.9f}")
    assert worst >= 0.99999
