"""What a published config.json says is what transformers reads in it: sizes, norms, windows, frequencies.

The models are too large to run here: `test_parity_tiny` compares small ones of the same families.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import MODEL_MAPPING, AutoConfig

from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.architecture.rope.spec import RopeSpec
from executor_service.backends.torch_backend.files.architecture.rope.tables import rope_tables
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from tests.unit.executor.test_published_configs import PUBLISHED

NOT_ARCHITECTURE = "quantization_config", "auto_map"  # would want packages and code of the repository
CASES = [
    pytest.param(one["config"], id=f"{kind}-{one['model']}")
    for kind, models in PUBLISHED.items()
    for one in models
    if "refused" not in one
]
EXPERTS = "num_local_experts", "num_experts", "n_routed_experts"


@pytest.mark.parametrize("config", CASES)
def test_a_published_config_is_read_as_transformers_reads_it(config: Mapping[str, Any]) -> None:
    spec = spec_from_config(config, {}, "config.json")
    whole = AutoConfig.for_model(**{key: config[key] for key in config if key not in NOT_ARCHITECTURE})
    text = whole.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert (spec.heads, spec.kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert (spec.head_dim, spec.vocab_size) == (head_dim, text.vocab_size)
    assert spec.intermediate_size == (getattr(text, "shared_intermediate_size", 0) or text.intermediate_size)
    if spec.moe is not None:
        assert spec.moe.experts == next(getattr(text, name) for name in EXPERTS if hasattr(text, name))
        assert spec.moe.experts_per_token == text.num_experts_per_tok
    assert spec.context_length == text.max_position_embeddings
    residual = getattr(text, "residual_multiplier", 1.0)
    assert spec.norm_eps * residual**2 == pytest.approx(text.rms_norm_eps)
    scale = getattr(text, "query_pre_attn_scalar", head_dim) ** -0.5
    assert spec.attention_scale == pytest.approx(getattr(text, "attention_multiplier", scale))
    assert spec.tied_embeddings == whole.tie_word_embeddings
    assert_same_window(spec, text)
    assert_same_frequencies(spec, text)


def assert_same_window(spec: ModelSpec, text: Any) -> None:
    """The size of the window and its layers."""
    size = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    size = size if size and size < spec.context_length else None
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * spec.layers
    layers = {i for i, kind in enumerate(kinds) if kind == "sliding_attention"} if size else set()
    assert (spec.window.size if spec.window else None) == (size if layers else None)
    assert (spec.window.layers if spec.window else set()) == layers


def assert_same_frequencies(spec: ModelSpec, text: Any) -> None:
    """Of position 1, as transformers' module has them: of all layers, or by their kinds."""
    module = importlib.import_module(MODEL_MAPPING[type(text)].__module__)
    name = next(one for one in vars(module) if one.endswith("RotaryEmbedding") and "Vision" not in one)
    theirs = getattr(module, name)(text)
    if hasattr(theirs, "inv_freq"):
        assert_same_angles(spec, spec.rope, theirs.inv_freq, theirs.attention_scaling)
        return
    assert spec.window is not None
    for kind, rope in (("full_attention", spec.rope), ("sliding_attention", spec.window.rope)):
        factor = getattr(theirs, f"{kind}_attention_scaling")
        assert_same_angles(spec, rope, getattr(theirs, f"{kind}_inv_freq"), factor)


def assert_same_angles(spec: ModelSpec, rope: RopeSpec, frequencies: torch.Tensor, factor: float) -> None:
    """To the last bit: `tables.py` evaluates each formula in transformers' order."""
    cos, sin = (table[1] for table in rope_tables(rope, spec.rotary_dim, 2)[:2])
    assert torch.equal(cos, frequencies.cos() * factor)
    assert torch.equal(sin, frequencies.sin() * factor)
