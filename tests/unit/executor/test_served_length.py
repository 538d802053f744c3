"""Where the rotation of all tokens depends on the served context, the log says so at the start."""

from __future__ import annotations

from typing import Any

import pytest

from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.architecture.rope.spec import served_length

_PHI_4_MINI: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "eos_token_id": 199999,
    "bos_token_id": 199999,
    "pad_token_id": 199999,
    "tie_word_embeddings": True,
}
_NTK: dict[str, Any] = {
    "model_type": "llama",
    "rope_scaling": {"type": "dynamic", "factor": 4.0},
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("config", "context", "used", "change"),
    [
        (_PHI_4_MINI, 131072, "longrope, long factors", "-E max-context=4096: longrope, short factors"),
        (_PHI_4_MINI, 4096, "longrope, short factors", "-E max-context= above 4096, up to 131072: scaled"),
        (_NTK, 8192, "dynamic NTK for 8192 tokens", "-E max-context=2048: dynamic NTK, not scaled"),
        (_NTK, 2048, "dynamic NTK, not scaled", "-E max-context= above 2048, up to 8192: scaled"),
    ],
)
def test_what_the_served_context_decides_is_told(
    config: dict[str, Any], context: int, used: str, change: str
) -> None:
    spec = spec_from_config(config, {}, "config.json")
    told = served_length(spec.rope, context, spec.context_length)
    assert told is not None
    assert told.used == used
    assert told.change.startswith(change)
    assert told.differs == (context == spec.context_length)


def test_nothing_is_told_where_no_length_decides() -> None:
    for config in (_NTK | {"rope_scaling": {"type": "linear", "factor": 2.0}}, _NTK | {"rope_scaling": None}):
        spec = spec_from_config(config, {}, "config.json")
        assert served_length(spec.rope, 64, spec.context_length) is None
    spec = spec_from_config(_PHI_4_MINI | {"max_position_embeddings": 4096}, {}, "config.json")
    assert served_length(spec.rope, 4096, spec.context_length) is None
