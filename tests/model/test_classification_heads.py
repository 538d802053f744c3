"""Models for sequence classification are refused by the name of their head.

The page on evaluations says what to serve instead: that is computed here.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from scheduler_service.rpc.codec.rerank import share_of_yes
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.tiny import save

YES, NO = 17, 41


def classifier(path: Path, *, tied: bool, labels: int = 1) -> PreTrainedModel:
    """transformers' own of the model in `path`, with a head and no output layer."""
    config = AutoConfig.from_pretrained(path, num_labels=labels, tie_word_embeddings=tied, pad_token_id=0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, dtype=torch.float32
    )
    return model.eval()


@pytest.mark.parametrize("name", ["qwen3", "llama", "hunyuan_v1_dense"])
@pytest.mark.parametrize(("tied", "labels"), [(True, 1), (False, 1), (False, 5)])
def test_a_model_for_classification_is_refused_by_the_name_of_its_head(
    name: str, tied: bool, labels: int, tmp_path: Path
) -> None:
    save(name, tmp_path / "base")
    classifier(tmp_path / "base", tied=tied, labels=labels).save_pretrained(tmp_path / "head")
    with pytest.raises(ModelError, match=r"'score\.weight' is a classification head.*to rerank, serve"):
        open_checkpoint(tmp_path / "head")


def test_yes_no_is_the_sigmoid_of_a_head_that_was_made_of_the_output_layer(tmp_path: Path) -> None:
    """Which is what conversions of Qwen3-Reranker have for a head."""
    rows = save("qwen3", tmp_path).state_dict()["lm_head.weight"]
    head = classifier(tmp_path, tied=True)
    head.load_state_dict({"score.weight": (rows[YES] - rows[NO])[None]}, strict=False)
    backend = TorchBackend(TorchConfig(tmp_path, threads=1))
    backend.load(lambda what, done: None)
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
