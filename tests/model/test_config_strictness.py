"""Hundreds of config.json files with one unknown or contradictory field each.

Each is refused by the field's name, or equal to transformers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.architecture.config_fields import HARMLESS
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.foreign_fields import FOREIGN_FIELDS
from tests.model.tiny import ALL_CONFIGS, NEWER_CONFIGS, save

TOKENS = np.random.default_rng(3).integers(3, 199, 40).tolist()
FAMILIES = list({make().model_type: name for name, make in reversed(ALL_CONFIGS.items())}.values())
NEWER = list(NEWER_CONFIGS)
UNUSED = "mamba_", "time_step_limit", "output_router_logits"
"""Fields of layers that no model has, and of outputs; of some values of them transformers fails."""
ROPE_FIELDS: dict[str, Any] = {
    "attention_factor": 1.25,
    "beta_fast": 16,
    "beta_slow": 2,
    "factor": 4.0,
    "finetuned": True,
    "high_freq_factor": 4.0,
    "long_factor": [2.0] * 8,
    "low_freq_factor": 1.0,
    "mrope_section": [2, 3, 3],
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
    "rope_theta": 500.0,
    "short_factor": [1.5] * 8,
    "truncate": False,
    "type": "linear",
    "alpha": 8.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"long_factor": [2.0] * 8, "short_factor": [1.5] * 8, "original_max_position_embeddings": 16},
}


def other_values(value: object) -> list[Any]:
    """Values of a field that mean something else."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value]
        case float():
            return [2 * value]
        case str():
            return [f"{value}_2"]
        case list():
            return [[*value, 1]]
    return [7]


def own_config(family: str) -> dict[str, Any]:
    """What transformers writes for a tiny model of this family."""
    config: dict[str, Any] = json.loads((ALL_CONFIGS | NEWER_CONFIGS)[family]().to_json_string())
    return config


def cases() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Kind of oddity, family, name of the one odd field, and what it changes in the config."""
    for family in [*FAMILIES, *NEWER]:
        for name, value in own_config(family).items():
            if name.startswith(UNUSED):
                continue
            if name not in ("rope_parameters", "tie_word_embeddings"):  # below, and in test_tied_head.py
                yield from ((family, family, name, {name: other}) for other in other_values(value))
    for name in sorted(own_config("llama").keys() - HARMLESS):
        yield "another type", "llama", name, {name: ["of another type"]}
    for name, value in FOREIGN_FIELDS.items():
        yield "foreign", "llama", name, {name: value}
    for kind, fields in ROPES.items():
        for name, value in ROPE_FIELDS.items():
            rope = {"rope_parameters": fields | {"rope_type": kind, name: value}}
            yield f"{kind} rope", "llama", name, rope


CASES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
for _kind, *_case in cases():
    CASES.setdefault(_kind, []).append(tuple(_case))  # type: ignore[arg-type]


@dataclass
class Base:
    """A model as it was saved, and what it computes."""

    path: Path
    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    logits: np.ndarray


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    """The model of a family, which is made once."""
    return functools.cache(lambda family: saved(family, tmp_path_factory.mktemp(family)))


def saved(family: str, path: Path) -> Base:
    model = save(family, path)
    return Base(path, spec_of(path), model.state_dict(), logits_of_transformers(path, model.state_dict()))


def spec_of(path: Path) -> ModelSpec:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint.spec


def logits_of_transformers(path: Path, weights: dict[str, torch.Tensor]) -> np.ndarray:
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(weights, strict=False)
    with torch.inference_mode():
        logits: np.ndarray = model.eval()(torch.tensor([TOKENS]), return_dict=True).logits[0].numpy()
        return logits


def logits_of_ours(path: Path) -> np.ndarray:
    backend = TorchBackend(TorchConfig(path, threads=1))
    backend.load(lambda what, done: None)
    backend.allocate(8, 16)
    [out] = backend.forward([Driver(pages_from(1), 16).feed(TOKENS, outputs=len(TOKENS))])
    backend.close()
    return logits_of(out)


def test_there_are_hundreds_of_cases() -> None:
    assert sum(map(len, CASES.values())) >= 600


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in NEWER else []) for kind in CASES]
)
def test_one_odd_field_is_refused_by_name_or_means_what_it_does_in_transformers(
    kind: str, base: Callable[[str], Base], tmp_path: Path
) -> None:
    for family, name, changes in CASES[kind]:
        model = base(family)
        config = json.loads((model.path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        if not (tmp_path / "model.safetensors").exists():
            (tmp_path / "model.safetensors").symlink_to(model.path / "model.safetensors")
        refusal = ""
        try:
            spec = spec_of(tmp_path)
        except ModelError as error:
            refusal = str(error)
        if refusal:
            assert name in refusal, changes
            continue
        expected = logits_of_transformers(tmp_path, model.weights)
        ours = model.logits if spec == model.spec else logits_of_ours(tmp_path)
        assert np.abs(ours - expected).max() < 1e-4 * max(1, np.abs(expected).max()), changes
