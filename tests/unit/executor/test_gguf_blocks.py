"""Blocks of GGUF files as numbers, scales and minima: those of ggml's own definition."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants
from numpy.typing import NDArray

from executor_service.backends.torch_backend.files.gguf_blocks import FORMATS, unpack


def drawn(kind: int, rows: int, blocks: int) -> NDArray[np.uint8]:
    """Rows of blocks of any bits but for scales, which are finite."""
    rng = np.random.default_rng(kind)
    form = FORMATS[kind]
    found = rng.integers(0, 256, (rows, blocks * form.dtype.itemsize), dtype=np.uint8).view(form.dtype)
    for name in form.dtype.names or ():
        if name in ("d", "m", "dmin"):
            found[name] = rng.normal(size=found.shape).astype(np.float16)
        if name == "e":
            found[name] %= 250
    return found.view(np.uint8)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: FORMATS[kind].name)
def test_numbers_scales_and_minima_are_what_the_gguf_package_dequantizes(kind: int) -> None:
    name = gguf.GGMLQuantizationType(kind)
    assert name.name == FORMATS[kind].name
    assert gguf.GGML_QUANT_SIZES[name] == (FORMATS[kind].size, FORMATS[kind].dtype.itemsize)
    rows = drawn(kind, 9, 3)
    numbers, scales, minima = unpack(kind, rows)
    size = numbers.shape[1] // scales.shape[1]
    values = numbers.reshape(*scales.shape, size).astype(np.float32) * scales[..., None]
    if minima is not None:
        values += minima[..., None]
    assert numbers.dtype == np.int8
    assert np.array_equal(values.reshape(9, -1), quants.dequantize(rows, name))


def test_nothing_that_is_unpacked_is_a_view_of_the_file() -> None:
    for kind in FORMATS:
        rows = drawn(kind, 1, 1)
        assert not any(part is not None and np.shares_memory(part, rows) for part in unpack(kind, rows))
