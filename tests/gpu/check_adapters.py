"""Rows of two adapters and of none in one step, beside transformers with the changes added to its weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch

from executor_service.adapters.weights import AdapterWeights
from tests.gpu import references
from tests.gpu.bench import Bench, Case

_SLOTS = (1, -1, 0)
"""Of each prompt."""


def cases(bench: Bench) -> list[Case]:
    """A case for each dtype and way."""
    from tests.gpu import check_tokens as check  # which asks for these cases
    from tests.model.random_adapters import random_adapter

    path, device, new = bench.directory / "adapters", bench.device, bench.pick(24, 8)
    model = references.saved("qwen3", path)
    found: list[Case] = []
    expected: tuple[list[list[int]], np.ndarray] | None = None
    for dtype in ("float32", "bfloat16"):
        for way in check.ways(device):
            what = f"{'CPU backend' if device.type == 'cpu' else device} {dtype}, adapters"
            case: Case = {"family": "qwen3", "compared": f"transformers fp32 on cpu, {what}", "way": way}
            try:
                backend = check.loaded(bench, path, str(device), dtype, way, adapters=2)
            except Exception as error:
                found.append(case | check.not_loaded(error))
                continue
            try:
                adapters = [random_adapter(backend, seed, rank) for seed, rank in ((1, 8), (2, 24))]
                for slot, adapter in enumerate(adapters):
                    backend.load_adapter(slot, backend.prepare_adapter(adapter))
                expected = expected or _expected(model, adapters, new)
                logits = check.follow(backend, expected[0], _SLOTS)
            except Exception as error:
                found.append(case | {"right": False, "failed": f"{type(error).__name__}: {error}"[:1000]})
                continue
            finally:
                backend.close()
            case |= references.agreement_of(expected[1], logits, check.ROUNDING[dtype])
            found.append(case | {"right": case["positions_given_up"] == 0})
    return found


def _expected(model: Any, adapters: list[AdapterWeights], new: int) -> tuple[list[list[int]], np.ndarray]:
    """What each prompt is continued with, by the model that its slot names."""
    models = [changed(model, adapter) for adapter in adapters] + [model]
    parts = [references.greedy(models[slot], new) for slot in _SLOTS]
    tokens = [tokens[number] for number, (tokens, _) in enumerate(parts)]
    return tokens, np.stack([logits[number] for number, (_, logits) in enumerate(parts)])


@torch.inference_mode()
def changed(model: Any, adapter: AdapterWeights) -> Any:
    """A copy of a transformers model whose weights have what the adapter adds."""
    made = deepcopy(model)
    for change in adapter.changes:
        layer = made.model.layers[change.layer]
        parent = layer.self_attn if hasattr(layer.self_attn, change.module) else layer.mlp
        weight = getattr(parent, change.module).weight
        weight += adapter.scale * torch.from_numpy(change.b @ change.a).to(weight)
    return made
