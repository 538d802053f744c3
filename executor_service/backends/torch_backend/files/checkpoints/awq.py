"""AWQ weights as AutoAWQ writes them: `quant_method` "awq", arXiv:2306.00978.

A weight [n, k] is scales * (numbers - zero points), with 4 bits for each number. In the version "gemm" all
tensors are transposed: `qweight` [k, n / 8] and `qzeros` [groups, n / 8] are packed along n, in the order
0 2 4 6 1 3 5 7, and `scales` are [groups, n]. In "gemv" `qweight` is [n, k / 8], `qzeros` [n, groups / 8] and
`scales` [n, groups], in plain order, and the groups are padded. "exllama" and "exllamav2" name kernels, for
which AutoAWQ reorders the tensors of "gemm" when it loads them.
"""

from __future__ import annotations

from typing import Protocol

import torch

from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.checkpoints.weight_format import (
    WHOLE_ROW,
    WORD_BITS,
    columns_in_groups,
    difference_dtype,
    group_count,
    group_size,
    module_names,
    of_groups,
    packed_bits,
    unpacked,
)
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.files.fields import Fields, shown
from executor_service.files.safetensors_header import FLOATS

_BITS = 4
_EACH = WORD_BITS // _BITS  # numbers of a word
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of the numbers in their order
_MAIN, _ZEROS, _SCALES = "qweight", "qzeros", "scales"


class _Layout(Protocol):
    """Where a version of the format has a module's numbers."""

    def shape(self, module: QuantizedModule, group: int) -> tuple[int, int]:
        """As `WeightFormat.shape`."""

    def numbers(self, module: QuantizedModule) -> torch.Tensor:
        """uint8 [n, k]."""

    def zeros(self, module: QuantizedModule, groups: int) -> torch.Tensor:
        """Zero points, uint8 [n, groups]."""

    def scales(self, module: QuantizedModule, groups: int) -> torch.Tensor:
        """fp32 [n, groups]. Raises ModelError for scales that are not positive and finite."""


class _Gemm:
    def shape(self, module: QuantizedModule, group: int) -> tuple[int, int]:
        k, words = module.matrix(_MAIN, "I32")
        groups = group_count(module, _MAIN, k, group)
        module.expect(_ZEROS, "I32", (groups, words))
        module.expect(_SCALES, FLOATS, (groups, words * _EACH))
        return words * _EACH, k

    def numbers(self, module: QuantizedModule) -> torch.Tensor:
        return self._in_order(module.read(_MAIN))

    def zeros(self, module: QuantizedModule, groups: int) -> torch.Tensor:
        return self._in_order(module.read(_ZEROS))

    def scales(self, module: QuantizedModule, groups: int) -> torch.Tensor:
        return module.scales(_SCALES).T.contiguous()

    @staticmethod
    def _in_order(words: torch.Tensor) -> torch.Tensor:
        """int32 [rows, n / 8] to uint8 [n, rows]."""
        mixed = unpacked(words, _BITS).reshape(len(words), -1, _EACH)
        return mixed[:, :, _PLACES].reshape(len(words), -1).T.contiguous()


class _Gemv:
    def shape(self, module: QuantizedModule, group: int) -> tuple[int, int]:
        n, words = module.matrix(_MAIN, "I32")
        k = words * _EACH
        width = self._padded(group_count(module, _MAIN, k, group), group)
        module.expect(_ZEROS, "I32", (n, width // _EACH))
        module.expect(_SCALES, FLOATS, (n, width))
        return n, k

    def numbers(self, module: QuantizedModule) -> torch.Tensor:
        return unpacked(module.read(_MAIN), _BITS)

    def zeros(self, module: QuantizedModule, groups: int) -> torch.Tensor:
        return unpacked(module.read(_ZEROS), _BITS)[:, :groups]

    def scales(self, module: QuantizedModule, groups: int) -> torch.Tensor:
        return module.scales(_SCALES, columns=groups)

    @staticmethod
    def _padded(groups: int, size: int) -> int:
        """Groups of a row with the padding of AutoAWQ's `calculate_zeros_width`."""
        words = {32: 4, 64: 2}.get(size, 1)
        return groups + -groups % (words * _EACH)


_LAYOUTS: dict[str, _Layout] = {
    **dict.fromkeys(("gemm", "exllama", "exllamav2"), _Gemm()),
    "gemv": _Gemv(),
}


class AwqFormat:
    """Implements `WeightFormat`."""

    main, beside, unused = _MAIN, frozenset((_ZEROS, _SCALES)), frozenset[str]()

    def __init__(self, config: Fields) -> None:
        """Raises ModelError for fields that ask for something else."""
        packed_bits(config, (_BITS,))
        self._group = group_size(config)
        version = config.get("version", config.get("format", "gemm"))
        layout = _LAYOUTS.get(version.lower()) if isinstance(version, str) else None
        if layout is None:
            raise config.fault(f"version {shown(version)} is not supported, only {', '.join(_LAYOUTS)}")
        config.flag("zero_point", default=True)  # without them the files have zero points of 8
        config.only("desc_act", (False,))
        config.only("format", (version,))
        self._layout = layout
        self.plain_modules = module_names(config, ("modules_to_not_convert",))
        self.title = f"AWQ ({version.lower()}) {of_groups(self._group)}"

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        return self._layout.shape(module, self._group)

    def check(self, module: QuantizedModule) -> None:
        self._layout.scales(module, self._groups(module))

    def read(self, module: QuantizedModule) -> ScaledNumbers:
        groups, dtype = self._groups(module), difference_dtype(_BITS)
        scales, columns = (
            self._layout.scales(module, groups),
            columns_in_groups(self.shape(module)[1], self._group),
        )
        numbers, zeros = self._layout.numbers(module), self._layout.zeros(module, groups)
        return ScaledNumbers(numbers.to(dtype).sub_(zeros.to(dtype)[:, columns]), scales, columns)

    def _groups(self, module: QuantizedModule) -> int:
        k = self.shape(module)[1]
        return 1 if self._group == WHOLE_ROW else k // self._group
