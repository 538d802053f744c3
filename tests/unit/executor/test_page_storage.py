"""Memory of KV pages on CPU is taken when it is used."""

import pytest
import torch

from executor_service.backends.resident import resident_bytes
from executor_service.backends.torch_backend.ops.page_format import page_storage

MB = 1 << 20
CPU = torch.device("cpu")


def test_pages_take_memory_when_they_are_written() -> None:
    before = resident_bytes()
    pages = page_storage(64, MB, dtype=torch.float32, device=CPU)
    assert resident_bytes() - before < 32 * MB  # of 256
    pages[:32] = 1
    assert 128 * MB <= resident_bytes() - before < 160 * MB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_pages_begin_as_zeros_that_kernels_can_read_aligned(dtype: torch.dtype) -> None:
    pages = page_storage(3, 5, 7, dtype=dtype, device=CPU)
    assert (pages.shape, pages.dtype) == ((3, 5, 7), dtype)
    assert pages.data_ptr() % 64 == 0
    assert not pages.float().any()


def test_a_format_without_scales_has_none() -> None:
    assert page_storage(3, 0, 7, dtype=torch.bfloat16, device=CPU).shape == (3, 0, 7)
