"""Products in equal waves, interpreted, compute what plain torch does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executor_service.backends.torch_backend.cuda.linear.pointwise import gated
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import new_arrivals
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from tests.gpu.wave_products import Waves, waves_launch

# Programs with one block and with several; inputs whole and in parts; blocks that are not full.
HOW = [Waves(processors=3), Waves(5, resident=2, tile_bytes=256), Waves(7, outputs=32, late=2)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("n", "k"), [(96, 1024), (40, 2000), (16, 4096)])
@pytest.mark.parametrize("kind", ["plain", "add", "gate"])
def test_products_in_waves_are_those_of_torch(how: Waves, n: int, k: int, kind: str) -> None:
    torch.manual_seed(n)
    both = 2 if kind == "gate" else 1
    x, weight = torch.randn(5, k).half(), (torch.randn(both * n, k) / k**0.5).half()
    out, arrivals = torch.randn(5, n).half(), new_arrivals(torch.device("cpu"))
    activation = Activation.SILU if kind == "gate" else None
    expected = (x.float() @ weight.float().T).half()
    if activation is not None:
        expected = gated(expected, activation)
    if kind == "add":
        expected = expected + out
    waves_launch(x, weight, None, out, arrivals, add=kind == "add", activation=activation, how=how).run()
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    assert not arrivals.any()


def test_the_busiest_program_has_little_more_than_its_share() -> None:
    for n, k in ((6144, 4096), (4096, 4096), (4096, 12288), (2560, 9728), (1024, 3072)):
        for how in (Waves(), replace(Waves(), resident=2, tile_bytes=256)):
            tiles = k * 2 // how.tile_bytes
            splits, part = how.parts(n // how.outputs, tiles)
            programs = how.processors * how.resident
            busiest = -(-(n // how.outputs) * splits // programs) * part
            assert busiest <= 1.2 * (n // how.outputs) * tiles / programs
