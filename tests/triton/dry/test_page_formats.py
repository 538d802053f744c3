"""Which formats of pages a GPU may have."""

from __future__ import annotations

import pytest
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.cuda.launch import toolchain
from executor_service.backends.torch_backend.kernel_choice import make_kernels
from tests.triton.dry.fake_device import fake_device


def test_fp8_pages_need_a_gpu_that_converts_fp8_and_int8_pages_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "check_toolchain", lambda: None)
    threads = torch.get_num_threads()

    def cache_dtype(kv_dtype: str) -> torch.dtype:
        return make_kernels("cuda", "bfloat16", kv_dtype, threads).cache_dtype

    with fake_device():
        assert cache_dtype("auto") == torch.bfloat16
        assert cache_dtype("fp8") == torch.float8_e4m3fn
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
        assert cache_dtype("int8") == torch.int8
        with pytest.raises(ModelError, match=r"kv-dtype fp8 needs .* 8\.9; 'cuda' has 8\.6"):
            cache_dtype("fp8")
