"""Adapters that PEFT has made give PEFT's logits, to 1e-4 in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.adapters.peft_directory import AdapterBounds, read_adapter
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.tiny import save
from tests.support.untyped import present

pytestmark = [
    pytest.mark.slow,  # for the import of peft
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers, when PEFT calls it
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "everything": {"r": 16, "lora_alpha": 32, "target_modules": ATTENTION + MLP},
    "rank-stabilized": {"r": 7, "lora_alpha": 5, "use_rslora": True, "target_modules": ATTENTION},
    "queries-and-values": {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "one-layer": {"r": 40, "lora_alpha": 8, "target_modules": ATTENTION, "layers_to_transform": [1]},
    "pattern": {"r": 4, "lora_alpha": 4, "target_modules": r".*self_attn\.(k|o)_proj"},
    "ranks-and-alphas": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ATTENTION,
        "rank_pattern": {r"layers.1.*q_proj": 3, "q_proj": 5, r"^model\.layers\.\d+\.self_attn\.o_proj": 12},
        "alpha_pattern": {"(k|v)_proj": 7, r"model.layers.0.self_attn.q_proj": 40},
        "exclude_modules": ["2.self_attn.v_proj"],
    },
    "ranks-stabilized": {
        "r": 8,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "rank_pattern": {"v_proj": 2},
        "exclude_modules": r".*layers\.0\..*o_proj",
    },
}
OF_A_MIXTURE = {"everything": {"r": 16, "lora_alpha": 32, "target_modules": ATTENTION}}
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": ADAPTERS,
    "llama-heads": ADAPTERS,
    "qwen2": ADAPTERS,
    "qwen3": ADAPTERS,
    "qwen3-moe": ADAPTERS | OF_A_MIXTURE,
    "qwen3-moe-mixed": ADAPTERS | OF_A_MIXTURE,
}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Our backend with all adapters in its slots, and PEFT's model with the same."""
    from peft import LoraConfig, get_peft_model

    path, adapters = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    base, model = save(request.param, path / "base"), None
    torch.manual_seed(5)
    for name, settings in adapters.items():
        config = LoraConfig(**settings, init_lora_weights=False)
        if model is None:
            model = get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    model = present(model).eval()
    model.save_pretrained(str(path / "adapters"))
    ours = TorchBackend(TorchConfig(path / "base"))
    ours.load(lambda what, done: None)
    ours.allocate(64, 16)
    for slot, name in enumerate(adapters):
        target, bounds = present(ours.info.adapters), AdapterBounds(256, 1 << 30)
        weights = read_adapter(path / "adapters", name, target, ours.info.fingerprint, bounds)
        ours.load_adapter(slot, ours.prepare_adapter(weights))
    yield ours, model
    ours.close()


def test_logits_are_those_of_peft(models: Any) -> None:
    ours, theirs = models
    pages, rng = pages_from(1), np.random.default_rng(3)
    prompts = [rng.integers(3, 211, 20 + 9 * i).tolist() for i in range(len(ADAPTERS))]
    rows = [
        replace(Driver(pages, 16).feed(prompt, outputs=len(prompt)), slot=slot)
        for slot, prompt in enumerate(prompts)
    ]
    for name, prompt, out in zip(ADAPTERS, prompts, ours.forward(rows), strict=True):
        theirs.set_adapter(name)
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0].numpy()
            with theirs.disable_adapter():
                plain = theirs(torch.tensor([prompt])).logits[0].numpy()
        largest = np.abs(expected - plain).max()
        assert largest > 1e-2
        assert np.abs(logits_of(out) - expected).max() < 1e-4 * largest
