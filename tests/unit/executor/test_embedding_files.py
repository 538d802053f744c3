"""A model's files say how it makes vectors: read as sentence-transformers does, or there are no vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from paceline.executor.v1 import executor_pb2 as pb
from tokenizers import Tokenizer

from executor_service.backends.base import EmbeddingDefaults, EmbeddingPooling
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.embedding_files import (
    embedding_from_directory,
    embedding_from_gguf,
)
from executor_service.backends.torch_backend.files.gguf_file import GgufFile
from executor_service.backends.torch_backend.files.tokenizer_files import tokenizer_from_gguf
from executor_service.rpc.info import capabilities
from tests.unit.executor.model_files import write_model

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."
BASE = (OLD + "Transformer", OLD + "Pooling")
NORMALIZED = (*BASE, OLD + "Normalize")
LAST, MEAN, CLS = EmbeddingPooling.LAST, EmbeddingPooling.MEAN, EmbeddingPooling.CLS


def write_modules(path: Path, *kinds: str, **pooling: Any) -> None:
    """The layout of sentence-transformers; `pooling`: that module's config."""
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": at, "name": str(at), "path": paths.get(kind.rpartition(".")[2], str(at)), "type": kind}
        for at, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16} | pooling))


def write_prompts(path: Path, **values: Any) -> None:
    (path / "config_sentence_transformers.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        (NORMALIZED, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, (LAST, True)),
        (BASE, {"pooling_mode_mean_tokens": True, "include_prompt": True}, (MEAN, False)),
        (BASE, {"pooling_mode_cls_token": True}, (CLS, False)),
        (BASE, {}, (MEAN, False)),
        ((OLD + "Transformer", NEW + "Pooling"), {"pooling_mode": "lasttoken"}, (LAST, False)),
        (NORMALIZED, {"pooling_mode": ["cls"], "pooling_mode_mean_tokens": True}, (CLS, True)),
        (NORMALIZED, {"pooling_mode": "lasttoken", "include_prompt": False}, (LAST, True)),
    ],
)
def test_pooling_and_normalization_are_those_of_the_directory(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], expected: tuple[EmbeddingPooling, bool]
) -> None:
    write_modules(tmp_path, *kinds, **pooling)
    assert embedding_from_directory(tmp_path) == EmbeddingDefaults(*expected)


def test_prompts_and_the_default_one_are_those_of_the_directory(tmp_path: Path) -> None:
    write_modules(tmp_path, *NORMALIZED, pooling_mode="lasttoken")
    write_prompts(
        tmp_path, prompts={"query": "Query: ", "document": "", "other": None}, default_prompt_name="query"
    )
    prompts = {"query": "Query: ", "document": "", "other": ""}
    expected = EmbeddingDefaults(LAST, normalize=True, prompts=prompts, default_prompt="query")
    assert embedding_from_directory(tmp_path) == expected
    write_prompts(tmp_path, prompts={}, default_prompt_name=None, similarity_fn_name="cosine")
    assert embedding_from_directory(tmp_path) == EmbeddingDefaults(LAST, normalize=True)


def test_a_directory_without_modules_says_nothing(tmp_path: Path) -> None:
    assert embedding_from_directory(tmp_path) == EmbeddingDefaults()


@pytest.mark.parametrize(
    ("kinds", "pooling", "why"),
    [
        ((*BASE, OLD + "Dense", OLD + "Normalize"), {}, "Dense"),
        ((*NORMALIZED, OLD + "Normalize"), {}, "only Transformer, Pooling, Normalize"),
        ((OLD + "Transformer",), {}, "only Transformer, Pooling"),
        ((), {}, "only Transformer, Pooling"),
        (("custom.Model", OLD + "Pooling"), {}, "Model, Pooling"),
        (BASE, {"pooling_mode_max_tokens": True}, "pooling_mode 'max'"),
        (BASE, {"pooling_mode_max_tokens": True, "pooling_mode_lasttoken": True}, "'max, lasttoken'"),
        (BASE, {"pooling_mode": ["mean", "cls"]}, "'mean, cls'"),
        (BASE, {"pooling_mode": [{}]}, "pooling_mode"),
        (BASE, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt False"),
    ],
)
def test_a_model_has_no_vectors_where_its_own_are_not_computed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kinds: tuple[str, ...],
    pooling: dict[str, Any],
    why: str,
) -> None:
    write_modules(tmp_path, *kinds, **pooling)
    assert embedding_from_directory(tmp_path) is None
    [record] = caplog.records
    assert why in record.fields["why"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules.json", "{}"),
        ("modules.json", "[1]"),
        ("modules.json", "[" * 100_000),
        ("modules.json", json.dumps([{"type": "a.Transformer", "path": "sub"}, {"type": "a.Pooling"}])),
        ("modules.json", json.dumps([{"type": "a.Transformer"}, {"type": "a.Pooling", "path": ".."}])),
        ("modules.json", json.dumps([{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "/etc"}])),
        ("1_Pooling/config.json", "[]"),
        ("sentence_bert_config.json", '{"do_lower_case": true}'),
        ("sentence_bert_config.json", '{"transformer_task": "text-generation"}'),
        ("config_sentence_transformers.json", '{"model_type": "SparseEncoder"}'),
        ("config_sentence_transformers.json", '{"prompts": ["a"]}'),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}'),
        ("config_sentence_transformers.json", '{"prompts": {"a": "\\ud800"}}'),
        ("config_sentence_transformers.json", json.dumps({"prompts": {"a": "é" * 2049}})),
        ("config_sentence_transformers.json", json.dumps({"prompts": {str(n): "" for n in range(65)}})),
        ("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": "a"}'),
        ("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": ["a"]}'),
    ],
)
def test_files_that_say_something_else_cost_the_vectors_and_not_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: str
) -> None:
    write_modules(tmp_path, *BASE)
    assert embedding_from_directory(tmp_path)
    (tmp_path / name).write_text(content)
    assert embedding_from_directory(tmp_path) is None
    assert len(caplog.records) == 1


def test_a_loaded_model_offers_its_vectors_or_none(tmp_path: Path) -> None:
    write_model(tmp_path)
    for mode, expected in (("cls", EmbeddingDefaults(CLS, normalize=True)), ("max", None)):
        write_modules(tmp_path, *NORMALIZED, pooling_mode=mode)
        backend = TorchBackend(TorchConfig(tmp_path, threads=1))
        backend.load(lambda what, done: None)
        assert backend.info.can_pool == (expected is not None)
        assert backend.info.embedding == (expected or EmbeddingDefaults())
        assert (pb.CAPABILITY_POOLING in capabilities(backend.info)) == (expected is not None)


@pytest.mark.parametrize(("kind", "pooling"), [(0, None), (1, MEAN), (2, CLS), (3, LAST)])
def test_the_pooling_of_a_gguf_file_is_llama_cpps(kind: int, pooling: EmbeddingPooling | None) -> None:
    metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": kind}
    assert embedding_from_gguf(metadata, "a.gguf") == EmbeddingDefaults(pooling)


@pytest.mark.parametrize("kind", [4, "mean", [3]])
def test_a_gguf_file_that_is_pooled_otherwise_has_no_vectors(kind: Any) -> None:
    metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": kind}
    assert embedding_from_gguf(metadata, "a.gguf") is None


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_a_gguf_files_tokenizer_adds_what_the_file_says(tmp_path: Path, begins: bool, ends: bool) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "<a:0 b>", "<|e|>", "ab"])
    writer.add_token_types([1, 1, 3, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    bundle = tokenizer_from_gguf(GgufFile(tmp_path / "a.gguf"))
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    assert bundle.add_bos == begins
    assert tokenizer.encode("ab").ids == [*([2] if begins else []), 4, *([3] if ends else [])]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [4]
