"""An adapter as int32 numbers, from which each of the other ranks takes its part.

slot, rank, scale (the bits of an fp64: two numbers), number of changes;
of each change the layer, the number of its linear layer, the formats of A and B, inputs, outputs;
the bytes of all factors, A before B, and zeros up to a multiple of four
"""

from __future__ import annotations

from typing import Any

import numpy as np

from executor_service.adapters.weights import PARENTS, AdapterWeights, LinearKey, LowRankChange
from executor_service.backends.torch_backend.parallel.plan_buffer import Body

_NAMES = list(PARENTS)
# The last one has the bits of bf16.
_FORMATS: list[np.dtype[Any]] = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16)]
_HEAD, _CHANGE = 5, 6  # numbers
SLOT = 0
"""The number that says to which slot the adapter goes."""


def buffer_bytes(changed: list[LinearKey], stored: int) -> int:
    """Bytes of an adapter's buffer, whose factors have `stored`."""
    return 4 * (_HEAD + _CHANGE * len(changed)) + stored + -stored % 4


def pack_weights(weights: AdapterWeights) -> Body:
    """The buffer of an adapter, for slot 0."""
    body = np.zeros(buffer_bytes(weights.keys, weights.bytes) // 4, np.int32)
    head = _HEAD + _CHANGE * len(weights.changes)
    body[1] = weights.rank
    body[2:4] = np.array([weights.scale]).view(np.int32)
    body[4] = len(weights.changes)
    body[_HEAD:head] = [number for change in weights.changes for number in _numbers(change)]
    data, end = body[head:].view(np.uint8), 0
    for change in weights.changes:
        for factor in (change.a, change.b):
            data[end : end + factor.nbytes] = np.ascontiguousarray(factor).reshape(-1).view(np.uint8)
            end += factor.nbytes
    return body


def unpack_weights(body: Body) -> AdapterWeights:
    """The adapter of a buffer, without its fingerprint; the factors are views."""
    rank, count = int(body[1]), int(body[4])
    head = _HEAD + _CHANGE * count
    changes, data, end = [], body[head:].view(np.uint8), 0
    for layer, name, a_format, b_format, inputs, outputs in body[_HEAD:head].reshape(-1, _CHANGE).tolist():
        factors = []
        for number, shape in ((a_format, (rank, inputs)), (b_format, (outputs, rank))):
            kind = _FORMATS[number]
            size = shape[0] * shape[1] * kind.itemsize
            factors.append(data[end : end + size].view(kind).reshape(shape))
            end += size
        changes.append(LowRankChange(layer, _NAMES[name], *factors))
    return AdapterWeights(b"", rank, float(body[2:4].copy().view(np.float64)[0]), tuple(changes))


def _numbers(change: LowRankChange) -> tuple[int, ...]:
    formats = (_FORMATS.index(factor.dtype) for factor in (change.a, change.b))
    return change.layer, _NAMES.index(change.module), *formats, change.a.shape[1], change.b.shape[0]
