"""GGUF files as llama.cpp writes them hold the models that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.architectures import config_of
from tests.model.gguf_models import convert
from tests.model.quantized import test_mxfp4 as mxfp4
from tests.model.quantized import written
from tests.model.test_architectures import check_batch, check_pieces, expected_of, loaded
from tests.model.tiny import save_random

# What the format says nothing of: a window of Mistral, and which of Gemma's layers have one (all but each
# sixth), their theta, and the scale of scores.
_FIXED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": None},
    "gemma2": {
        "num_hidden_layers": 3,
        "layer_types": None,
        "query_pre_attn_scalar": 12,
        "tie_word_embeddings": True,
    },
    "gemma3": {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 12},
}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *[
        (architecture, variant, {})
        for architecture in ("mistral", "gemma3", "phi3", "olmo2", "olmo3", "mixtral")
        for variant in ("plain", "odd-heads", "one-kv-head", "tied", "sharded", "bf16")
        if variant != "odd-heads" or architecture != "gemma3"
    ],
    ("mistral", "wide-heads", {}),
    ("mistral", "linear-rope", {}),
    ("gemma3", "wide-heads", {"query_pre_attn_scalar": 256}),
    ("gemma3", "odd-heads", {"max_position_embeddings": 512}),
    ("gemma3", "plain", {"rope_parameters": {"full_attention": _LINEAR}}),
    ("phi3", "window", {}),
    ("phi3", "partial-rotary", {}),
    ("olmo2", "linear-rope", {}),
    ("olmo2", "multi-head", {}),
    ("mixtral", "one-expert", {}),
    ("mixtral", "multi-head", {}),
    *[
        (architecture, variant, {})
        for architecture in ("granite", "smollm3", "seed_oss", "ernie4_5", "glm4", "exaone4", "gemma2")
        for variant in ("plain", "one-kv-head", "tied", "bf16")
    ],
    ("granite", "biases", {}),
    ("granite", "large-residual", {}),
    ("smollm3", "biases", {}),
    ("seed_oss", "all-biases", {}),
    ("ernie4_5", "biases", {}),
    ("ernie4_5", "wide-heads", {}),
    ("glm4", "no-bias", {}),
    ("exaone4", "no-window", {}),
    ("exaone4", "long-window", {}),
    ("gemma2", "window-of-one", {}),
    *[
        (architecture, variant, {})
        for architecture in ("olmoe", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss", "granitemoehybrid")
        for variant in ("plain", "one-kv-head", "odd-heads", "tied", "bf16")
    ],
    *[
        (architecture, variant, {})
        for architecture in ("ministral3", "glm", "hunyuan_v1_dense")
        for variant in ("plain", "one-kv-head", "odd-heads", "tied", "bf16")
    ],
    ("olmoe", "one-expert", {}),
    ("olmoe", "yarn", {}),
    ("qwen2_moe", "no-bias", {}),
    ("glm4_moe", "qk-norm", {}),
    ("glm4_moe", "dense-layers", {}),
    ("glm4_moe", "shares-as-they-are", {}),
    ("minimax_m2", "one-expert", {}),
    ("minimax_m2", "wide-heads", {}),
    ("gpt_oss", "no-bias", {}),
    ("gpt_oss", "wide-heads", {}),
    ("gpt_oss", "plain-rope", {}),
    ("granitemoehybrid", "bias", {}),
    ("granitemoehybrid", "yarn", {}),
    ("ministral3", "growing-always", {}),
    ("ministral3", "not-growing", {}),
    ("glm", "no-bias", {}),
    ("hunyuan_v1_dense", "bias", {}),
    ("hunyuan_v1_dense", "wide-heads", {}),
    ("hunyuan_v1_dense", "no-alpha", {}),
    ("hunyuan_v1_dense", "linear-rope", {}),
]


@pytest.mark.parametrize(
    ("architecture", "variant", "changes"),
    [pytest.param(*case, marks=[] if case[1] == "one-kv-head" else pytest.mark.slow) for case in CASES],
)
def test_a_gguf_file_is_the_same_model(
    architecture: str, variant: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(architecture, variant, **_FIXED.get(architecture, {}) | changes)
    expected = expected_of(save_random(config, tmp_path / "model"))
    backend = loaded(convert(tmp_path / "model", tmp_path / "model.gguf"))
    check_pieces(backend, expected)
    check_batch(backend, expected)
    backend.close()


@pytest.mark.parametrize(("architecture", "options"), [("glm", {"fused": True}), ("glm4_moe", {"drafts": 2})])
def test_a_file_may_join_q_k_and_v_and_have_blocks_that_draft(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = expected_of(save_random(config_of(architecture, "plain"), tmp_path / "model"))
    backend = loaded(convert(tmp_path / "model", tmp_path / "model.gguf", **options))
    check_pieces(backend, expected)
    backend.close()


def test_experts_in_mxfp4_are_the_same_in_both_formats(tmp_path: Path) -> None:
    """In fp32 as transformers dequantizes them, and as blocks, bit by bit, with activations of 8 bits."""
    theirs = mxfp4.write(tmp_path / "model")
    file = convert(tmp_path / "model", tmp_path / "model.gguf")
    written.assert_equal(file, theirs)
    found = []
    for path in (tmp_path / "model", file):
        backend = written.loaded(path, "blocks")
        found.append((written.our_logits(backend), backend.memory_bytes()["weights"]))
        backend.close()
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
