"""GPTQ weights in the order of the Marlin kernel: `checkpoint_format` "marlin", arXiv:2408.11743.

A weight [n, k] of 4 bits is scales * (numbers - 8). `B` [k / 16, 2 n] has the numbers in pieces of 16 inputs
by 64 outputs, each in the order in which the 32 lanes of a warp read it (`pack` of IST-DASLab's marlin); `s`
[groups, n] has the scales, with the outputs of each 64 in the order in which lanes need them, or of each 32
where a row has one scale. `workspace` means nothing.
"""

from __future__ import annotations

import torch

from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.checkpoints.weight_format import (
    columns_in_groups,
    group_count,
    group_size,
    module_names,
    of_groups,
    packed_bits,
    unpacked,
)
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.files.fields import Fields
from executor_service.files.safetensors_header import FLOATS

_TILE, _BITS, _ZERO = 16, 4, 8
_OUTPUTS = 64  # of a piece of B that has an order of its own
_MAIN, _SCALES, _WORKSPACE = "B", "s", "workspace"


class MarlinFormat:
    """Implements `WeightFormat`."""

    main, beside, unused = _MAIN, frozenset((_SCALES, _WORKSPACE)), frozenset[str]()

    def __init__(self, config: Fields) -> None:
        """Raises ModelError for fields that ask for something else."""
        packed_bits(config, (_BITS,))
        self._group = group_size(config)
        config.only("desc_act", (False,))
        config.only("sym", (True,))
        config.only("dynamic", ({},))
        config.only("pack_dtype", ("int32",))
        config.ignore("checkpoint_format", "format", "is_marlin_format")
        self.plain_modules = module_names(config, ("modules_to_not_convert",))
        self.title = f"GPTQ (Marlin) with {_BITS} bits {of_groups(self._group)}"

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        rows, words = module.matrix(_MAIN, "I32")
        k, n = rows * _TILE, words // 2
        if words % (2 * _OUTPUTS):
            raise module.fault(_MAIN, f"has {words} words in a row, expected a multiple of {2 * _OUTPUTS}")
        module.expect(_SCALES, FLOATS, (group_count(module, _MAIN, k, self._group), n))
        return n, k

    def check(self, module: QuantizedModule) -> None:
        module.scales(_SCALES, signed=True)

    def read(self, module: QuantizedModule) -> ScaledNumbers:
        n, k = self.shape(module)
        numbers = torch.empty(k // _TILE, n // _OUTPUTS, _TILE * _OUTPUTS, dtype=torch.int8)
        numbers[..., _lane_order()] = unpacked(module.read(_MAIN), _BITS).view(numbers.shape).to(torch.int8)
        tiles = numbers.view(k // _TILE, n // _TILE, _TILE, _TILE)
        stored = module.scales(_SCALES, signed=True)
        order = _scale_order(by_row=len(stored) == 1)
        scales = torch.empty_like(stored).view(len(stored), -1, len(order))
        scales[..., order] = stored.view(scales.shape)
        return ScaledNumbers(
            tiles.permute(1, 3, 0, 2).reshape(n, k).sub_(_ZERO),
            scales.view(len(stored), n).T.contiguous(),
            columns_in_groups(k, self._group),
        )


def _lane_order() -> torch.Tensor:
    """The place in its four tiles, each [16 inputs, 16 outputs], of each number of a piece, [1024].

    A lane has 8 numbers of each tile: of two outputs, 8 apart, four inputs each. Of these 8, which are one
    word, those at even places come first.
    """
    lane, tile, half, row = torch.meshgrid(*map(torch.arange, (32, 4, 2, 4)), indexing="ij")
    inputs = 2 * (lane % 4) + row % 2 + 8 * (row // 2)
    places = (256 * tile + _TILE * inputs + lane // 4 + 8 * half).reshape(-1, 8)
    return places[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def _scale_order(*, by_row: bool) -> torch.Tensor:
    """The outputs whose scales stand side by side: of 64, or of 32 where a row has one scale."""
    if by_row:
        pairs = torch.tensor([0, 1, 8, 9, 16, 17, 24, 25])
        return (2 * torch.arange(4)[:, None] + pairs).flatten()
    return (torch.arange(8)[:, None] + 8 * torch.arange(8)).flatten()
