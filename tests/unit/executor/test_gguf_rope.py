"""Rotary embedding of a GGUF file is that of the config.json that it was converted from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.architecture.rope.from_config import RopeRule
from executor_service.backends.torch_backend.files.architecture.rope.from_gguf import rope_from_gguf
from executor_service.backends.torch_backend.files.architecture.rope.spec import LongRope, RopeSpec
from executor_service.backends.torch_backend.files.architecture.rope.tables import rope_tables
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from executor_service.files.fields import Fields
from tests.unit.executor.model_files import CONFIG, refuses, write_gguf

LONG, SHORT = [1.5, 2.0, 3.0, 4.0], [1.0, 1.0, 1.25, 1.5]
FACTORS = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}


def spec_of(path: Path, **options: Any) -> ModelSpec:
    write_gguf(path / "tiny.gguf", **options)
    checkpoint = open_checkpoint(path / "tiny.gguf")
    checkpoint.close()
    return checkpoint.spec


def of_config(**changes: Any) -> ModelSpec:
    return spec_from_config(CONFIG | changes, {}, "config.json")


def test_yarn_is_that_of_the_config(tmp_path: Path) -> None:
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}
    theirs, ours = of_config(rope_parameters=yarn), spec_of(tmp_path, keys=keys)
    assert ours.rope == theirs.rope
    assert ours.context_length == theirs.context_length == 128


def test_the_attention_factor_of_the_file_multiplies_yarns(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}
    assert spec_of(tmp_path, keys=keys).rope.attention_factor == 0.5 * (1 + 0.1 * math.log(4))


@pytest.mark.parametrize("keys", [{}, {"rope.scaling.type": "longrope"}])
def test_longrope_is_that_of_the_config(keys: dict[str, Any], tmp_path: Path) -> None:
    """Files of Phi-3 have the tensors, and no type."""
    attention_factor = {"rope.scaling.attn_factor": 1.125, "rope.scaling.original_context_length": 32}
    longrope = {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT}
    given = longrope | {"attention_factor": 1.125, "original_max_position_embeddings": 32}
    ours = spec_of(tmp_path, keys=keys | attention_factor, rope_factors=FACTORS)
    assert ours.rope == of_config(rope_parameters=given).rope


def test_the_served_context_chooses_the_factors() -> None:
    """llama.cpp does so too."""
    rope = RopeSpec(10_000.0, LongRope(tuple(SHORT), tuple(LONG), 32))

    def divided_by(divisors: list[float], context: int) -> bool:
        plain = RopeSpec(10_000.0, divisors=tuple(divisors))
        ours, theirs = rope_tables(rope, 8, context), rope_tables(plain, 8, context)
        return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))

    assert divided_by(SHORT, 32)
    assert divided_by(LONG, 33)
    assert not divided_by(SHORT, 33)


def test_divisors_change_nothing_of_what_the_other_keys_say() -> None:
    keys = {"mistral3.rope.scaling.type": "yarn", "mistral3.rope.scaling.factor": 16.0}
    keys |= {"mistral3.attention.temperature_scale": 0.1, "mistral3.rope.scaling.yarn_log_multiplier": 1.0}
    with_divisors, without = (
        rope_from_gguf(Fields(keys, "x"), "mistral3", 8, 512, factors, RopeRule(grows=True))
        for factors in ({"rope_freqs.weight": (2.0,) * 4}, {})
    )
    assert replace(with_divisors, divisors=()) == without
    assert (without.attention_factor, without.query_growth) == (1.0, 0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keys": {"rope.scaling.type": "longrope"}}, "rope_factors_long.weight"),
        ({"rope_factors": {"rope_factors_long.weight": LONG}}, "rope_factors_short.weight"),
        ({"rope_factors": FACTORS | {"rope_freqs.weight": LONG}}, "rope_freqs.weight"),
        ({"rope_factors": FACTORS | {"rope_factors_long.weight": LONG[1:]}}, "has 3 numbers, expected 4"),
        ({"rope_factors": {"rope_freqs.weight": [1.0] * 5000}}, "rope_freqs.weight"),
        ({"rope_factors": {"rope_freqs.weight": [LONG]}}, "rope_freqs.weight"),
        ({"rope_factors": FACTORS, "keys": {"rope.scaling.factor": 4.0}}, "rope.scaling.factor"),
        ({"rope_factors": FACTORS, "keys": {"rope.scaling.type": "yarn"}}, "rope.scaling.type"),
        ({"keys": {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}}, "yarn_ext_factor"),
        ({"keys": {"rope.scaling.type": "yarn", "rope.freq_base": 1.0}}, "rope.freq_base"),
        ({"keys": {"rope.scaling.type": "yarn", "rope.scaling.factor": 1e9}}, "rope.scaling.factor"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "odd.gguf", **options)
    refuses(tmp_path / "odd.gguf", "odd.gguf", words)
