"""On a CUDA device: `pytest tests/gpu -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import check_tokens, e6_bits
from tests.gpu.bench import Bench

pytestmark = pytest.mark.gpu


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(torch.device("cuda:0"), False, tmp_path, {})


def test_tokens_are_those_of_the_cpu_and_of_transformers(bench: Bench) -> None:
    cases = list(check_tokens.run(bench))
    assert all(case["tokens_equal"] for case in cases if "bfloat16" not in case["compared"])


def test_the_same_step_twice_is_bitwise_the_same(bench: Bench) -> None:
    cases = {case["compared"]: case for case in e6_bits.run(bench)}
    assert cases["the same decode twice"]["bitwise_equal"]
