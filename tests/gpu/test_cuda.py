"""On a CUDA device: `pytest tests/gpu -m gpu`.

Where a plugin that pyproject configures is missing: `-W default::pytest.PytestConfigWarning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor_service.backends.base import RowOutput
from executor_service.backends.forward_rows import ForwardRows
from executor_service.contract.plan import OutputMode, Sampling
from tests.bench.step_time import rows_of
from tests.gpu import check_tokens, e6_bits
from tests.gpu.bench import PAGE, Bench
from tests.model.driver import Driver, pages_from

pytestmark = pytest.mark.gpu
_SAMPLE = OutputMode.SAMPLE


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(torch.device("cuda:0"), False, tmp_path, {})


def test_tokens_are_those_of_the_cpu_and_of_transformers(bench: Bench) -> None:
    cases = list(check_tokens.run(bench))
    assert all(case["tokens_equal"] for case in cases if case["compared"].endswith("cuda:0 float32"))


def test_the_same_step_twice_is_bitwise_the_same(bench: Bench) -> None:
    cases = {case["compared"]: case for case in e6_bits.run(bench)}
    assert cases["the same decode twice"]["bitwise_equal"]


def test_captured_steps_launched_ahead_give_the_tokens_of_steps_one_by_one(bench: Bench) -> None:
    expected, found = (_generated(bench, graphs=graphs) for graphs in (False, True))
    assert found == expected


def test_dependent_launches_change_no_token(bench: Bench) -> None:
    if torch.cuda.get_device_capability(bench.device) < (9, 0):
        pytest.skip("the device has no dependent launches")
    expected, found = (_generated(bench, graphs=True, dependent=dependent) for dependent in (False, True))
    assert found == expected


def test_a_captured_step_waits_for_nothing(bench: Bench) -> None:
    backend = bench.backend("Qwen3-0.6B", tokens=512)
    try:
        backend.capture(8, 128, lambda what, done: None)
        rows = rows_of(5, 1, 40, Sampling(temperature=0.8, top_k=20, top_p=0.9), backend.info.vocab_size)
        backend.forward(rows)
        torch.cuda.set_sync_debug_mode("error")
        try:
            flight = backend.launch(ForwardRows(rows))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(out.finite for out in flight.outputs())
    finally:
        backend.close()


def _generated(bench: Bench, *, graphs: bool, dependent: bool = False) -> list[list[int]]:
    """Tokens of eight sequences; with graphs, each step is launched before the one before it is read."""
    backend = bench.backend("Qwen3-0.6B", tokens=1024, dependent=dependent)
    try:
        if graphs:
            backend.capture(8, 128, lambda what, done: None)
        sampling = Sampling(temperature=0.8, top_p=0.95, seed=4)
        pages = pages_from(1)
        drivers = [
            Driver(pages, PAGE) for _ in range(8)
        ]  # as many as its graph has rows: products of one shape
        rows = [d.feed(range(3, 30 + n), output=_SAMPLE, sampling=sampling) for n, d in enumerate(drivers)]
        flight, tokens = backend.launch(ForwardRows(rows)), []
        for _ in range(24):
            if graphs:
                rows = [d.feed([0], output=_SAMPLE, sampling=sampling) for d in drivers]
                following = backend.launch(
                    ForwardRows([replace(row, follows=n) for n, row in enumerate(rows)])
                )
                tokens.append(_tokens(flight.outputs()))
                flight = following
            else:
                tokens.append(_tokens(flight.outputs()))
                rows = [
                    d.feed([t], output=_SAMPLE, sampling=sampling)
                    for d, t in zip(drivers, tokens[-1], strict=True)
                ]
                flight = backend.launch(ForwardRows(rows))
        return [*tokens, _tokens(flight.outputs())]
    finally:
        backend.close()


def _tokens(outputs: Sequence[RowOutput]) -> list[int]:
    return [int(out.tokens[0]) for out in outputs if out.tokens is not None]
