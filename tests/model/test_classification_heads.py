"""Models for sequence classification give their head's scores, those of transformers, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    Gemma3ForSequenceClassification,
    PreTrainedModel,
)

from executor_service.backends.base import Backend, ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Opening, OutputMode, PoolingKind, RowResult
from scheduler_service.rpc.codec.rerank import share_of_yes
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.test_tensor_parallel import backend_of
from tests.model.test_tensor_parallel import config_of as config_of_ranks
from tests.model.tiny import randomize, save
from tests.model.wrapped_models import config_of
from tests.unit.executor.harness import Harness, opening, row

YES, NO = 17, 41
TEXTS = [np.random.default_rng(n).integers(3, 211, n).tolist() for n in (1, 2, 15, 16, 17, 40, 131)]


def classifier(path: Path, *, tied: bool, labels: int = 1) -> PreTrainedModel:
    """transformers' own of the model in `path`, with a random head and no output layer."""
    config = AutoConfig.from_pretrained(path, num_labels=labels, tie_word_embeddings=tied, pad_token_id=0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, dtype=torch.float32
    )
    randomize(model)
    return model.eval()


def loaded(path: Path, dtype: str = "float32") -> TorchBackend:
    backend = TorchBackend(TorchConfig(path, threads=2, dtype=dtype))
    backend.load(lambda what, done: None)
    return backend


def engine_of(backend: Backend) -> Harness:
    size = backend.info.hidden_size
    return Harness(replace(Limits(211, 512, 16, 63, 32, 32, 512), hidden_size=size), backend)


def pooled(cache_id: int, tokens: list[int], limit: int = 0, salt: bytes = b"") -> Opening:
    made = opening(cache_id, tokens, limit, output=OutputMode.HIDDEN)
    return replace(made, pooling=PoolingKind.LAST, salt=salt)


def scores_of(result: RowResult) -> np.ndarray:
    assert result.hidden is not None
    return result.hidden


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("qwen3", 1),
        ("llama-untied-bias", 3),
        ("llama-heads", 1),
        ("qwen2", 3),
        ("gemma2", 1),
        ("mistral", 5),
        ("hunyuan_v1_dense", 1),
        ("qwen3-moe", 3),
    ],
)
def test_scores_are_those_of_transformers_however_a_text_is_computed(
    name: str, labels: int, tmp_path: Path
) -> None:
    """Alone, beside others, in chunks and behind a cached prefix: the same bits."""
    save(name, tmp_path / "base")
    theirs = classifier(tmp_path / "base", tied=labels == 1, labels=labels)
    theirs.save_pretrained(tmp_path / "head")
    backend = loaded(tmp_path / "head")
    assert (backend.info.can_sample, backend.info.can_score) == (False, False)
    assert (backend.info.hidden_size, backend.info.embedding.normalize) == (labels, False)
    engine = engine_of(backend)
    alone = [scores_of(engine.row(pooled(1 + i, text))) for i, text in enumerate(TEXTS)]
    for text, ours in zip(TEXTS, alone, strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([text])).logits[0].numpy()
        assert ours.shape == (labels,)
        np.testing.assert_allclose(ours, want, atol=1e-4)
    beside = engine.step(*(pooled(21 + i, text, salt=b"b") for i, text in enumerate(TEXTS))).rows
    assert [scores_of(one).tobytes() for one in beside] == [one.tobytes() for one in alone]
    text = TEXTS[-1]
    hit = engine.row(pooled(40, text))
    assert hit.cached_length == 128
    assert scores_of(hit).tobytes() == alone[-1].tobytes()
    last = engine.row(pooled(41, text, limit=50, salt=b"c"))
    assert last.hidden is None
    while last.kv_length < len(text):
        last = engine.row(row(41, last.kv_length, limit=50, output=OutputMode.HIDDEN))
    assert scores_of(last).tobytes() == alone[-1].tobytes()
    once = backend.forward_once([np.array(text, np.int32)], frozenset({"hidden"}))[0].hidden
    assert once is not None
    assert once.shape == (len(text), labels)
    assert once[-1].tobytes() == alone[-1].tobytes()
    backend.close()


def test_a_text_model_inside_of_another_has_the_head_beside_it(tmp_path: Path) -> None:
    """Its name has no prefix, unlike those of the text model; it was left out, and tied weights generated."""
    config = config_of("gemma3")
    config.num_labels = config.text_config.num_labels = 3
    theirs = Gemma3ForSequenceClassification(config).float().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    backend = loaded(tmp_path)
    ours = scores_of(engine_of(backend).row(pooled(1, TEXTS[-2])))
    backend.close()
    with torch.inference_mode():
        ids = torch.tensor([TEXTS[-2]])
        want = theirs(ids, token_type_ids=torch.zeros_like(ids)).logits[0].numpy()
    np.testing.assert_allclose(ours, want, atol=1e-4)


@pytest.mark.slow
def test_two_ranks_give_the_scores_of_one(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "base")
    classifier(tmp_path / "base", tied=True, labels=3).save_pretrained(tmp_path / "head")
    found = []
    for ranks in (1, 2):
        backend = backend_of(config_of_ranks(tmp_path / "head", ranks))
        backend.load(lambda what, done: None)
        engine = engine_of(backend)
        found.append([scores_of(engine.row(pooled(1 + i, text))) for i, text in enumerate(TEXTS)])
        backend.close()
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_8_bit_weights_change_scores_a_little(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "base")
    theirs = classifier(tmp_path / "base", tied=True, labels=3)
    theirs.save_pretrained(tmp_path / "head")
    backend = loaded(tmp_path / "head", "int8")
    ours = scores_of(engine_of(backend).row(pooled(1, TEXTS[-1])))
    backend.close()
    with torch.inference_mode():
        want = theirs(torch.tensor([TEXTS[-1]])).logits[0].numpy()
    assert 0 < np.abs(ours - want).max() < 0.1 * np.abs(want).max()


def lies(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    tensors[name] = torch.ones(shape)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: lies(tensors, "score.weight", (64,)), r"'score\.weight' has the shape \(64,\)"),
        (lambda tensors: lies(tensors, "score.weight", (0, 64)), r"'score\.weight' has the shape \(0, 64\)"),
        (lambda tensors: lies(tensors, "score.weight", (2, 64)), r"expected \(1, 64\), by num_labels"),
        (lambda tensors: lies(tensors, "score.weight", (1, 63)), r"expected \(1, 64\)"),
        (lambda tensors: lies(tensors, "score.bias", (1,)), r"'score\.bias' is in the file, but"),
        (lambda tensors: lies(tensors, "lm_head.weight", (211, 64)), "a model has one of both heads"),
        (lambda tensors: lies(tensors, "lm_head.bias", (211,)), r"'lm_head\.bias' is in the file, but"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None], why: str, tmp_path: Path
) -> None:
    save("qwen3", tmp_path / "base")
    classifier(tmp_path / "base", tied=True).save_pretrained(tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=why):
        open_checkpoint(tmp_path / "head")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"'score\.weight' has the shape \(1, 64\), expected \(2, 64\)"),
        ({"id2label": None}, r"expected \(2, 64\), by num_labels \(id2label\)"),  # 2 is transformers' default
        ({"id2label": None, "num_labels": 10**12}, "num_labels is 1000000000000"),
        ({"id2label": []}, r"id2label is '\[\]'"),
        ({"num_labels": 3}, "num_labels 3 is not supported, only 1"),
        ({"id2label": None, "num_labels": 1}, ""),
    ],
)
def test_a_head_has_the_labels_of_its_configuration(
    fields: dict[str, object], why: str, tmp_path: Path
) -> None:
    save("qwen3", tmp_path / "base")
    classifier(tmp_path / "base", tied=True).save_pretrained(tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    if not why:
        with closing(open_checkpoint(tmp_path / "head")) as checkpoint:
            assert checkpoint.spec.labels == 1
        return
    with pytest.raises(ModelError, match=why):
        open_checkpoint(tmp_path / "head")


def test_a_head_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "base")
    model = classifier(tmp_path / "base", tied=True)
    model.load_state_dict({"score.weight": torch.full((1, 64), torch.nan)}, strict=False)
    model.save_pretrained(tmp_path / "head")
    with pytest.raises(ModelError, match=r"score\.weight.*NaN"):
        loaded(tmp_path / "head")


def test_yes_no_is_the_sigmoid_of_a_head_that_was_made_of_the_output_layer(tmp_path: Path) -> None:
    """Which is what conversions of Qwen3-Reranker have for a head."""
    rows = save("qwen3", tmp_path).state_dict()["lm_head.weight"]
    head = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, pad_token_id=0, dtype=torch.float32
    ).eval()
    head.load_state_dict({"score.weight": (rows[YES] - rows[NO])[None]}, strict=False)
    backend = loaded(tmp_path)
    backend.allocate(40, 16)
    for seed in range(20):
        tokens = np.random.default_rng(seed).integers(3, 211, 5 + 9 * seed).tolist()
        with torch.inference_mode():
            score = head(torch.tensor([tokens])).logits.item()
        [out] = backend.forward([Driver(pages_from(1), 16).feed(tokens)])
        logits = logits_of(out)[0]
        assert abs(score) > 1e-3
        assert abs(share_of_yes(logits[YES], logits[NO]) - 1 / (1 + math.exp(-score))) < 1e-5
    backend.close()
