"""fp8 weights (e4m3) as DeepSeek, Qwen and AutoFP8 write them: `quant_method` "fp8".

A weight [n, k] has a scale for each block of `weight_block_size`, `weight_scale_inv`, [ceil(n / rows),
ceil(k / columns)], by which it is multiplied (DeepSeek-V3's `weight_dequant`). Without blocks one scale,
there or in `weight_scale`, is the whole tensor's, or [n, 1] are the rows'. Scales of static activations are
not used: activations are not quantized.
"""

from __future__ import annotations

import torch

from executor_service.backends.torch_backend.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.checkpoints.weight_format import (
    WHOLE_ROW,
    columns_in_groups,
    module_names,
)
from executor_service.backends.torch_backend.scaled_numbers import ScaledNumbers
from executor_service.files.fields import Fields, shown
from executor_service.files.safetensors_header import FLOATS

_SCALES = ("weight_scale_inv", "weight_scale")


class BlockScales:
    """Scales of a weight [n, k], one for each block of rows x columns; see `fp8_weight`."""

    def __init__(self, block: tuple[int, int] | None) -> None:
        """None: one for the whole weight, or for each row."""
        self.block = block

    def check_shape(self, module: QuantizedModule, suffix: str, n: int, k: int) -> None:
        """Raises ModelError unless the scales are those of a weight [n, k]."""
        if self.block is None:
            module.expect(suffix, FLOATS, (), (1,), (1, 1), (n,), (n, 1))
        else:
            rows, columns = self.block
            module.expect(suffix, FLOATS, (-(-n // rows), -(-k // columns)))

    def applied(self, module: QuantizedModule, suffix: str, numbers: torch.Tensor) -> ScaledNumbers:
        """Numbers [n, k] with their scales. Raises ModelError for scales that are not positive and finite."""
        n, k = numbers.shape
        scales = module.scales(suffix)
        if self.block is None:
            return ScaledNumbers(numbers, scales.reshape(-1, 1).expand(n, 1), columns_in_groups(k, WHOLE_ROW))
        rows, columns = self.block
        by_row = scales.repeat_interleave(rows, 0)[:n]
        return ScaledNumbers(numbers, by_row, columns_in_groups(k, columns))


class Fp8Format:
    """Implements `WeightFormat`."""

    main, beside = "weight", frozenset((*_SCALES, "input_scale", "activation_scale"))

    def __init__(self, config: Fields) -> None:
        """Raises ModelError for fields that ask for something else."""
        config.only("fmt", ("e4m3", "float8_e4m3fn"))
        config.only("scale_fmt", ("float", "ue8m0"))  # of values that are stored as fp32 all the same
        config.only("activation_scheme", ("dynamic", "static"))
        config.only("expert_dtype", ("fp8",))
        self.plain_modules = module_names(config, ("modules_to_not_convert", "ignored_layers"))
        block = block_size(config, "weight_block_size")
        self._scales = BlockScales(block)
        self.title = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        n, k = module.matrix(self.main, "F8_E4M3")
        self._scales.check_shape(module, _scale_of(module), n, k)
        return n, k

    def check(self, module: QuantizedModule) -> None:
        module.scales(_scale_of(module))

    def read(self, module: QuantizedModule) -> ScaledNumbers:
        return self._scales.applied(module, _scale_of(module), module.read(self.main))


def block_size(f: Fields, key: str) -> tuple[int, int] | None:
    """A field of two positive numbers, rows and columns; None if it is missing or null. Raises ModelError."""
    given = f.get(key, None)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2:
        raise f.fault(f"{key} is {shown(given)}, expected the rows and columns of a block")
    sizes = Fields(dict(zip(("rows", "columns"), given, strict=True)), f"{f.where}: {key}")
    return sizes.size("rows"), sizes.size("columns")


def _scale_of(module: QuantizedModule) -> str:
    """The suffix of the scales. Raises ModelError if there are two."""
    first, second = _SCALES
    if module.has(first) and module.has(second):
        raise module.fault(second, f"is there beside {first}")
    return second if module.has(second) else first
