"""The ranks' shares are a model of their own each, and together the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.parallel.cut import Cut
from tests.model.tiny import CONFIGS, MORE_CONFIGS

EVERY = CONFIGS | MORE_CONFIGS
SPLITS = [(name, 3 if name == "llama-heads" else ranks) for name in EVERY for ranks in (1, 2, 4)]


def spec_of(name: str) -> ModelSpec:
    return spec_from_config(EVERY[name]().to_dict(), {}, name)


@pytest.mark.parametrize(("name", "ranks"), SPLITS)
def test_shares_have_the_shapes_of_their_spec_and_make_up_the_whole(name: str, ranks: int) -> None:
    spec = spec_of(name)
    if name == "llama-heads":
        spec = replace(spec, intermediate_size=90)
    cuts = [Cut(spec, rank, ranks) for rank in range(ranks)]
    local = [dict(expected_shapes(cut.local)) for cut in cuts]
    for tensor, shape in expected_shapes(spec):
        times = torch.zeros(shape, dtype=torch.int32)
        for cut, shapes in zip(cuts, local, strict=True):
            share = times[cut.part(tensor) or ()]
            assert tuple(share.shape) == shapes[tensor]
            share += 1
        held = times.unique().tolist()
        assert len(held) == 1  # every element as often as every other
        copied = all(cut.part(tensor) is None for cut in cuts)
        of_keys = any(part in tensor for part in (".k_proj", ".v_proj", ".k_norm"))
        copies = ranks // spec.kv_heads if of_keys else 1
        assert held == [ranks if copied else max(copies, 1)]


def test_a_rank_has_the_kv_heads_that_its_heads_read() -> None:
    spec = replace(spec_of("qwen3"), heads=8, kv_heads=2)
    size = spec.head_dim
    for rank in range(4):
        cut = Cut(spec, rank, 4)
        (queries,) = cut.part("model.layers.0.self_attn.q_proj.weight") or ()
        (keys,) = cut.part("model.layers.0.self_attn.k_proj.weight") or ()
        assert {head // 4 for head in range(queries.start // size, queries.stop // size)} == {
            keys.start // size
        }


@pytest.mark.parametrize(
    ("changes", "ranks", "fault"),
    [
        ({}, 3, "4 heads"),
        ({"heads": 12, "kv_heads": 4}, 6, "4 KV heads"),
        ({"intermediate_size": 89}, 2, "89 MLP neurons"),
        ({"vocab_size": 3}, 4, "3 ids"),
    ],
)
def test_what_can_not_be_split_is_refused_by_name(changes: dict[str, int], ranks: int, fault: str) -> None:
    with pytest.raises(ModelError, match=f"--tensor-parallel {ranks}: .*{fault}"):
        Cut(replace(spec_of("qwen3"), **changes), 0, ranks)  # type: ignore[arg-type]
