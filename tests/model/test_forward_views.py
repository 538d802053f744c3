"""Forward with position ids and attention masks equals transformers to 1e-4 in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.contract.forward_view import ForwardView
from tests.model.tiny import CONFIGS, save
from tests.support.untyped import present

NAMES = [
    name
    for name in CONFIGS
    if name in ("llama", "gemma3", "qwen3", "mistral", "phi3", "qwen3_moe", "mixtral")
]
TOKENS = np.random.default_rng(5).integers(3, 211, 300).astype(np.int32)
RNG = np.random.default_rng(6)
POSITIONS = np.sort(RNG.choice(500, len(TOKENS), replace=False)).astype(np.int32)
KEYS = RNG.random(len(TOKENS)) < 0.7
KEYS[::7] = True  # each window has a token that is seen
PAIRS = (RNG.random((len(TOKENS), len(TOKENS))) < 0.5) | np.eye(len(TOKENS), dtype=np.bool_)


@pytest.fixture(scope="module", params=NAMES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path: Path = tmp_path_factory.mktemp(request.param)
    theirs, ours = save(request.param, path), TorchBackend(TorchConfig(path))
    ours.load(lambda what, done: None)
    yield theirs, ours
    ours.close()


@pytest.mark.parametrize(
    "view",
    [
        ForwardView(positions=POSITIONS),
        ForwardView(mask=KEYS),
        ForwardView(first=20, count=270, positions=POSITIONS, mask=KEYS),
        ForwardView(mask=PAIRS),
    ],
    ids=["positions", "keys", "both", "pairs"],
)
def test_logits_equal_transformers(models: Any, view: ForwardView) -> None:
    theirs, ours = models
    given: dict[str, torch.Tensor] = {}
    if view.positions is not None:
        given["position_ids"] = torch.from_numpy(view.positions)[None].long()
    if view.mask is not None and view.mask.ndim == 1:
        given["attention_mask"] = torch.from_numpy(view.mask)[None].long()
    elif view.mask is not None:
        if ours.info.attention_window:
            pytest.skip("transformers takes a mask of pairs for all layers, and leaves out the window")
        seen = torch.from_numpy(np.tril(view.mask))
        given["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(TOKENS)[None].long(), **given).logits[0].numpy()
    wanted = frozenset({"hidden", "embedding", "logits"})
    (found,) = ours.forward_once([TOKENS], wanted, view)
    assert np.abs(present(found.logits) - expected[view.returned]).max() <= 1e-4
    assert present(found.hidden).shape[0] == len(expected[view.returned])


def test_a_view_that_changes_nothing_changes_nothing(models: Any) -> None:
    _, ours = models
    (plain,) = ours.forward_once([TOKENS], frozenset({"logits"}))
    everything = ForwardView(positions=np.arange(300, dtype=np.int32), mask=np.ones(300, np.bool_))
    (same,) = ours.forward_once([TOKENS], frozenset({"logits"}), everything)
    assert np.abs(present(plain.logits) - present(same.logits)).max() <= 1e-5
