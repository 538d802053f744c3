"""Programmatic dependent launches: of which kernels, and that one which does not wait is noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.model.model import Model
from executor_service.contract.plan import OutputMode, Sampling
from tests.gpu.shapes import spec_of
from tests.triton.ahead_of_time import DEPENDENT
from tests.triton.compiled import compiled
from tests.triton.dry import mutants
from tests.triton.dry.fake_device import Weights

PAGES, PAGE = 16, 16
STEP = {
    "_resolve_kernel", "_items_kernel", "_norm_kernel", "_few_rows_kernel", "_rotary_kernel",
    "_attention_kernel", "_survey_kernel", "_pick_kernel", "_accept_kernel",
}  # fmt: skip
LATE = {"_count_kernel", "_penalize_kernel", "_publish_kernel"}
"""What rows with penalties launch after the step."""


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (mutants.in_order, ""),
        (mutants.asks_in_order, ""),
        (mutants.lets_start_late, ""),
        (mutants.lets_start_on_one_path, "it does not wait and signal on every path"),
        (mutants.lets_start_again, "it does not wait and signal on every path"),
        (mutants.lets_start_first, "it does not wait and signal once each"),
        (mutants.asks_for_results, "it asks for what is no weight before it waits"),
        (mutants.asks_for_either, "it asks for what is no weight before it waits"),
        (mutants.asks_for_what_results_name, "it touches memory before it waits"),
        (mutants.loads_weights_first, "it touches memory before it waits"),
        (mutants.asks_too_late, "it asks for weights behind its wait"),
        (mutants.waits_never, "it does not wait for the kernel before"),
        (mutants.loads_first, "it touches memory before it waits"),
        (mutants.stores_first, "it touches memory before it waits"),
        (mutants.counts_first, "it touches memory before it waits"),
        (mutants.leaves_first, "it does not wait and signal on every path"),
        (mutants.begins_twice, "it does not wait and signal once each"),
    ],
)
def test_a_kernel_that_does_not_wait_first_is_found(kernel: Any, fault: str) -> None:
    numbers = torch.zeros(1, dtype=torch.int32, device="meta")
    every: dict[str, torch.Tensor | int] = {"out": numbers, "weight": numbers, "stride": 64}
    arguments = {name: every[name] for name in kernel.arg_names}
    launch = Launch(kernel, (8, 1, 1), arguments, {}, warps=1, stages=1)
    assert compiled(launch, DEPENDENT, dependent=True).disorder[: len(fault) or None] == fault
    assert compiled(launch, DEPENDENT).disorder == ""


@pytest.mark.parametrize("dependent", [False, True])
def test_the_kernels_of_a_step_are_launched_dependently_and_those_behind_it_plainly(dependent: bool) -> None:
    launched: list[tuple[str, bool]] = []

    def run(kernel: Any, *arguments: Any, launch_pdl: bool = False, **named: Any) -> None:
        launched.append((kernel.fn.__name__, launch_pdl))

    spec = replace(spec_of("Qwen3-8B"), layers=1, hidden_size=64, intermediate_size=64, vocab_size=512)
    with mock.patch.object(JITFunction, "run", run), mock.patch.object(torch, "empty", torch.zeros):
        with torch.inference_mode():
            kernels = CudaKernels(torch.device("cpu"), torch.bfloat16)
            model = Model(Weights(spec), kernels, lambda what, done: None)
        runner = DeviceRunner(model, model.new_caches(PAGES, PAGE), PAGE, dependent=dependent)
        history, table = np.zeros(8, np.int32), np.array([1], np.int32)
        row = ForwardRow(7, history[7:], history, 7, table, 1, OutputMode.SAMPLE, Sampling())
        runner.launch(ForwardRows([row])).outputs()
        assert {name for name, _ in launched} >= STEP
        assert {how for _, how in launched} == {dependent}
        step = launched.copy()
        launched.clear()
        runner.launch(ForwardRows([replace(row, sampling=Sampling(frequency_penalty=0.1))])).outputs()
    assert launched[: len(step)] == step
    behind = launched[len(step) :]
    assert {name for name, _ in behind} >= LATE
    assert {how for _, how in behind} == {False}
