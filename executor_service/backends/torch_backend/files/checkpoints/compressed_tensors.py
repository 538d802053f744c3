"""Weights that the library compressed-tensors writes (llm-compressor): `quant_method` "compressed-tensors".

A weight [n, k] is scales * (numbers - zero points), as the library's `dequantize` has it. In the formats
"float-quantized", "int-quantized" and "naive-quantized" `weight` has the numbers, fp8 (e4m3) or int8; in
"pack-quantized" `weight_packed` has them in words, plus half their range, and `weight_shape` is [n, k].
`weight_scale` and `weight_zero_point` have one value for the tensor, or one for each row, group of columns or
block. Scales of static activations are not used: activations are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from executor_service.backends.torch_backend.files.checkpoints.block_scales import BlockScales, block_size
from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.checkpoints.weight_format import (
    METADATA,
    PACKED_BITS,
    WORD_BITS,
    group_count,
    module_names,
    unpacked,
    unused_scales,
)
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.files.fields import Fields, shown

_SCALE, _ZEROS, _INDEX, _SHAPE = "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
_PACKED = "pack-quantized"
_TYPES = {
    "float-quantized": ("float",),
    "int-quantized": ("int",),
    "naive-quantized": ("float", "int"),
    _PACKED: ("int",),
}
"""The types of numbers that each format has."""
_OFFSETS = {4: 8, 8: 128}  # of packed numbers, by their bits


class _Numbers(Protocol):
    """Where a format has a module's numbers."""

    main: str  # suffix of their tensor

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        """(n, k). Raises ModelError."""

    def read(self, module: QuantizedModule) -> torch.Tensor:
        """[n, k], int8 or fp8."""

    def check_zeros(self, module: QuantizedModule, grid: tuple[int, int]) -> None:
        """Raises ModelError unless there is a zero point for each block of this grid."""

    def zeros(self, module: QuantizedModule, grid: tuple[int, int]) -> torch.Tensor:
        """Zero points, int8."""


class _PlainNumbers:
    main = "weight"

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        return module.matrix(self.main, self._dtype)

    def read(self, module: QuantizedModule) -> torch.Tensor:
        return module.read(self.main)

    def check_zeros(self, module: QuantizedModule, grid: tuple[int, int]) -> None:
        module.expect(_ZEROS, "I8", module.entry(_SCALE).shape)

    def zeros(self, module: QuantizedModule, grid: tuple[int, int]) -> torch.Tensor:
        return module.read(_ZEROS)


class _PackedNumbers:
    main = "weight_packed"

    def __init__(self, bits: int) -> None:
        self._bits, self._each = bits, WORD_BITS // bits

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        rows, words = module.matrix(self.main, "I32")
        module.expect(_SHAPE, frozenset(("I64", "I32")), (2,))
        n, k = module.read(_SHAPE).tolist()
        if n != rows or k < 1 or words != -(-k // self._each):
            raise module.fault(_SHAPE, f"is {n} x {k}, but {self.main} has {rows} rows of {words} words")
        return n, k

    def read(self, module: QuantizedModule) -> torch.Tensor:
        return self._signed(module.read(self.main))[:, : self.shape(module)[1]]

    def check_zeros(self, module: QuantizedModule, grid: tuple[int, int]) -> None:
        module.expect(_ZEROS, "I32", (-(-grid[0] // self._each), grid[1]))

    def zeros(self, module: QuantizedModule, grid: tuple[int, int]) -> torch.Tensor:
        return self._signed(module.read(_ZEROS).T).T[: grid[0]]

    def _signed(self, words: torch.Tensor) -> torch.Tensor:
        return (unpacked(words, self._bits).short() - _OFFSETS[self._bits]).to(torch.int8)


class CompressedTensorsFormat:
    """Implements `WeightFormat`."""

    beside = frozenset(
        (_SCALE, _ZEROS, _INDEX, _SHAPE, "input_scale", "input_zero_point", "input_global_scale")
    )

    def __init__(self, config: Fields) -> None:
        """Raises ModelError for fields that ask for something else."""
        config.only("quantization_status", ("compressed",))
        config.only("sparsity_config", ({}, {"format": "dense"}))
        config.only("transform_config", ({},))
        self.unused = unused_scales(config)
        config.only("moe_sparsity_config", ())
        name = config.get("format", None)
        if not isinstance(name, str) or name not in _TYPES:
            raise config.fault(f"format {shown(name)} is not supported, only {', '.join(_TYPES)}")
        weights = _weights_of_all_groups(config, name)
        self._numbers, bits = _numbers_of(weights, name)
        self.main = self._numbers.main
        self._group, block, strategy = None, None, _strategy(weights)
        if strategy == "group":
            self._group = weights.size("group_size")
            block = 1, self._group
        elif strategy == "block":
            block = block_size(weights, "block_structure")
            if block is None:
                raise weights.fault("block_structure is missing")
        self._scales = BlockScales(block)
        self._has_zeros = not weights.flag("symmetric", default=True)
        self._ordered = weights.get("actorder", None) in ("group", "dynamic", True)
        self.plain_modules = module_names(config, ("ignore",))
        weights.ignore(*METADATA, "group_size", "block_structure", "actorder")
        weights.refuse_unread()
        sizes = "" if block is None else " of " + " x ".join(map(str, block))
        self.title = f"compressed-tensors {name} with {bits} bits by {strategy}{sizes}"

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        n, k = self._numbers.shape(module)
        if self._group is not None:
            group_count(module, self.main, k, self._group)
        self._scales.check_shape(module, _SCALE, n, k)
        if self._has_zeros:
            self._numbers.check_zeros(module, self._scales.grid(n, k))
        if module.has(_INDEX) or (self._ordered and self._group is not None):
            module.expect(_INDEX, "I32", (k,))
        return n, k

    def check(self, module: QuantizedModule) -> None:
        module.scales(_SCALE)
        self._groups(module, self.shape(module)[1])

    def read(self, module: QuantizedModule) -> ScaledNumbers:
        n, k = self.shape(module)
        numbers, groups = self._numbers.read(module), self._groups(module, k)
        if self._has_zeros:
            zeros = self._scales.of_rows(self._numbers.zeros(module, self._scales.grid(n, k)), n)
            numbers = numbers.short().sub_(zeros[:, groups])
        return ScaledNumbers(numbers, self._scales.of_rows(module.scales(_SCALE), n), groups)

    def _groups(self, module: QuantizedModule, k: int) -> torch.Tensor:
        """The group of each column. Raises ModelError for an index that does not fill all groups."""
        if not module.has(_INDEX):
            return self._scales.groups(k)
        groups = module.groups(_INDEX, self._scales.grid(1, k)[1])
        if not torch.equal(groups.sort().values, self._scales.groups(k)):
            raise module.fault(_INDEX, "has groups of different sizes")
        return groups


def _weights_of_all_groups(config: Fields, name: str) -> Fields:
    """The arguments of weights, the same in all `config_groups`. Raises ModelError."""
    groups = config.get("config_groups", {})
    if not isinstance(groups, Mapping) or not groups:
        raise config.fault(f"config_groups is {shown(groups)}, expected an object with groups")
    found: list[Mapping[str, Any]] = []
    for key, group in groups.items():
        where = f"{config.where}: config_groups: {key[:80]}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise Fields({}, where).fault("weights is missing")
        scheme = Fields(group, where)
        scheme.only("format", (name,))
        scheme.ignore(*METADATA, "weights")
        scheme.refuse_unread()
        found.append(group["weights"])
        if found[-1] != found[0]:
            raise Fields({}, where).fault("weights differs from another group's, which is not supported")
    return Fields(found[0], f"{config.where}: config_groups: {next(iter(groups))[:80]}: weights")


def _numbers_of(weights: Fields, name: str) -> tuple[_Numbers, int]:
    """Where the numbers are, and their bits. Raises ModelError."""
    bits, kind = weights.size("num_bits", 8), weights.get("type", "int")
    if not isinstance(kind, str) or kind not in _TYPES[name]:
        raise weights.fault(f"type {shown(kind)} is not supported in the format {name}")
    is_float = kind == "float"
    if bits not in ((8,) if is_float else PACKED_BITS):
        raise weights.fault(f"num_bits {bits} is not supported for {kind}")
    if is_float:
        weights.only("symmetric", (True,))
    weights.only("dynamic", (False,))
    if name == _PACKED:
        return _PackedNumbers(bits), bits
    return _PlainNumbers("F8_E4M3" if is_float else "I8"), bits


def _strategy(weights: Fields) -> str:
    """The strategy, or what the library infers where it is missing. Raises ModelError."""
    size = weights.get("group_size", None)
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy", inferred)
    if strategy not in ("tensor", "channel", "group", "block"):
        raise weights.fault(f"strategy {shown(strategy)} is not supported for weights")
    return str(strategy)
