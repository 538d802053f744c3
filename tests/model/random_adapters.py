"""Adapters of random weights that fit a backend's model."""

from __future__ import annotations

import numpy as np

from executor_service.adapters.weights import AdapterWeights, LowRankChange, make_weights
from executor_service.backends.base import Backend
from tests.support.untyped import present


def random_adapter(
    backend: Backend, seed: int, rank: int, modules: frozenset[str] | None = None
) -> AdapterWeights:
    """Of all linear layers, or of these modules; an even seed leaves out the values of the first layer."""
    rng = np.random.default_rng(seed)
    changes = []
    for (layer, name), (inputs, outputs) in present(present(backend.info.adapters).linears).items():
        a = rng.standard_normal((rank, inputs)) / np.sqrt(inputs)
        b = rng.standard_normal((outputs, rank)) * 0.2 / np.sqrt(rank)
        left_out = (layer, name) == (0, "v_proj") and seed % 2 == 0
        if (modules is None or name in modules) and not left_out:
            changes.append(LowRankChange(layer, name, a.astype(np.float32), b.astype(np.float32)))
    return make_weights(rank, 1.5, changes, backend.info.fingerprint)
