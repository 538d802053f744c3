"""fp8 weights (e4m3) as DeepSeek, Qwen and AutoFP8 write them: `quant_method` "fp8".

A weight [n, k] has a scale for each block of `weight_block_size`, `weight_scale_inv`, [ceil(n / rows),
ceil(k / columns)], by which it is multiplied (DeepSeek-V3's `weight_dequant`). Without blocks one scale,
there or in `weight_scale`, is the whole tensor's, or [n, 1] are the rows'. Scales of static activations are
not used: activations are not quantized.
"""

from __future__ import annotations

from executor_service.backends.torch_backend.files.checkpoints.block_scales import BlockScales, block_size
from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.checkpoints.weight_format import (
    module_names,
    unused_scales,
)
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.files.fields import Fields

_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8Format:
    """Implements `WeightFormat`."""

    main, beside = "weight", frozenset((*_SCALES, "input_scale", "activation_scale"))

    def __init__(self, config: Fields) -> None:
        """Raises ModelError for fields that ask for something else."""
        config.only("fmt", ("e4m3", "float8_e4m3fn"))
        config.only("scale_fmt", ("float", "ue8m0"))  # of values that are stored as fp32 all the same
        config.only("activation_scheme", ("dynamic", "static"))
        config.only("expert_dtype", ("fp8",))
        self.unused = unused_scales(config)
        config.only("modules_to_convert", ([],))
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
        numbers = module.read(self.main)
        n, k = numbers.shape
        scales = self._scales.of_rows(module.scales(_scale_of(module)), n)
        return ScaledNumbers(numbers, scales, self._scales.groups(k))


def _scale_of(module: QuantizedModule) -> str:
    """The suffix of the scales. Raises ModelError if there are two."""
    first, second = _SCALES
    if module.has(first) and module.has(second):
        raise module.fault(second, f"is there beside {first}")
    return second if module.has(second) else first
