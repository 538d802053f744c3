"""Graphs launch as many programs of attention as fit the device, by what its kernels were compiled to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime import driver

from executor_service.backends.torch_backend.cuda.attention.attention import attention_launches
from executor_service.backends.torch_backend.cuda.attention.pipelines import (
    AttentionDevice,
    Multiprocessor,
    Pipelines,
)
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.layout.rows import (
    ITEM_FIELDS,
    AttentionRows,
    RowWork,
    Tiling,
)
from executor_service.backends.torch_backend.ops.page_format import plain_cache
from tests.triton.dry.unlaunched import unlaunched

PROCESSORS = 132
LIKE_90 = Multiprocessor(228 << 10, 2048)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "programs"),
    [
        (168, 74_752, 4, 3),  # by registers
        (169, 74_752, 4, 2),  # 176 of them
        (122, 76_800, 4, 3),  # by shared memory
        (122, 120_000, 4, 1),
        (255, 164_608, 8, 1),
        (16, 0, 8, 8),  # by threads
        (255, 230_000, 16, 0),  # by registers, and shared memory
    ],
)
def test_registers_shared_memory_and_threads_bound_how_many_programs_run_at_once(
    registers: int, shared_bytes: int, warps: int, programs: int
) -> None:
    assert LIKE_90.programs(registers, shared_bytes, warps) == programs


@pytest.mark.parametrize(("registers", "programs"), [(122, 3), (168, 3), (181, 2), (255, 2)])
def test_a_graph_launches_as_many_programs_as_the_compiled_kernel_lets_run(
    registers: int, programs: int
) -> None:
    with unlaunched():
        active = driver.active
        utils = mock.Mock(wraps=active.utils)
        utils.load_binary = lambda *_: (1, 2, registers, 0, 1024)
        utils.get_device_properties = active.utils.get_device_properties
        with mock.patch.object(type(active), "utils", utils):
            [launch] = decodes(AttentionDevice(Pipelines.of(228 << 10), LIKE_90.programs_of))
    assert launch.grid == (PROCESSORS * programs, 1, 1)


def decodes(device: AttentionDevice) -> Iterator[Launch]:
    """The launch of a graph for many decodes of an 8B model."""

    def zeros(*size: int, dtype: Any = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    tiling = Tiling.of(4, torch.bfloat16)
    short, long = (
        RowWork(zeros(n, ITEM_FIELDS), zeros(2), how)
        for n, (_, how) in zip((512, 0), tiling.classes, strict=True)
    )
    rows = AttentionRows(0, zeros(4), short, long, PROCESSORS)
    q = zeros(1, 32, 128, dtype=torch.bfloat16)
    cache = plain_cache(2, 16, 8, 128, torch.bfloat16, q.device)
    return attention_launches(q.flatten(1), q, cache, rows, zeros(8), 128**-0.5, device)
