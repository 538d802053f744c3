"""Published config.json files, by family, with the sources of their texts: accepted, or refused by name.

`published_configs` has a file for each `model_type`; `model` is as the source calls it, and says where the
text is not complete. Sources are copies, not the repositories of the models: revisions are not known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.architecture.config_wrappers import WRAPPERS
from executor_service.backends.torch_backend.files.architecture.families import FAMILIES
from executor_service.backends.torch_backend.files.architecture.spec import QkNorm

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    file.stem: json.loads(file.read_text())
    for file in sorted((Path(__file__).parent / "published_configs").iterdir())
}
CASES = [
    pytest.param(kind, one, id=f"{kind}-{one['model']}")
    for kind, models in PUBLISHED.items()
    for one in models
]
ONLY_INSIDE = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
"""Of text models that are published within models for images alone."""


@pytest.mark.parametrize(("kind", "one"), CASES)
def test_a_published_config_is_accepted_or_refused_by_name(kind: str, one: dict[str, Any]) -> None:
    config = one["config"]
    assert config["model_type"] == kind
    assert one["text"]
    if "refused" in one:
        with pytest.raises(ModelError, match=rf"\b{one['refused']}\b"):
            spec_from_config(config, {}, "config.json")
        return
    spec = spec_from_config(config, {}, "config.json")
    text = config.get("text_config", config)
    assert spec.layers == text["num_hidden_layers"]
    assert (spec.heads, spec.kv_heads) == (text["num_attention_heads"], text["num_key_value_heads"])
    assert spec.hidden_size == text["hidden_size"]
    assert spec.vocab_size == text.get("vocab_size", spec.vocab_size)
    assert spec.context_length >= text.get("max_position_embeddings", 0)


def test_there_are_three_of_each_model_type_that_loads() -> None:
    kinds = {*FAMILIES, *WRAPPERS} - ONLY_INSIDE
    assert {kind for kind in kinds if len(PUBLISHED.get(kind, ())) < 3} == set()


def test_no_family_reorders_queries_and_keys_that_have_norms() -> None:
    """The norms' weights, one for each number of a head, would have to be reordered as well."""
    assert not [
        kind
        for kind, one in FAMILIES.items()
        if (one.pairs or one.gguf_pairs) and one.qk_norm is not QkNorm.NONE
    ]
