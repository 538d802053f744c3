"""GPTQ weights as AutoGPTQ and GPTQModel write them: `quant_method` "gptq", arXiv:2210.17323.

A weight [n, k] is `qweight` [k * bits / 32, n], packed along k; `qzeros` [groups, n * bits / 32], packed
along n; `scales` [groups, n]; and `g_idx` [k], the group of each input, which act-order (`desc_act`)
permutes. It is scales * (numbers - zero points). In the format "gptq" zero points are stored less 1, in
"gptq_v2" as they are. GPTQModel converts one into the other by integer arithmetic on whole words (its
`convert_gptq_v1_to_v2_format_module`), which is done here too: so a zero point of 0 survives. Scales may be
negative: AutoRound writes such.
"""

from __future__ import annotations

from executor_service.backends.torch_backend.files.checkpoints.marlin import MarlinFormat
from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.checkpoints.weight_format import (
    PACKED_BITS,
    WHOLE_ROW,
    WORD_BITS,
    WeightFormat,
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

_FIRST, _SECOND = "gptq", "gptq_v2"  # versions of the format
_ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in each number of a word


class GptqFormat:
    """Implements `WeightFormat`."""

    main, beside, unused = "qweight", frozenset(("qzeros", "scales", "g_idx")), frozenset[str]()

    def __init__(self, config: Fields) -> None:
        """Raises ModelError for fields that ask for something else."""
        self._bits, self._group = packed_bits(config, PACKED_BITS), group_size(config)
        version = config.get("checkpoint_format", config.get("format", _FIRST))
        config.only("rotation", ())
        config.only("adapter", ())
        if version not in (_FIRST, _SECOND):
            raise config.fault(
                f"checkpoint_format {shown(version)} is not supported, only gptq, gptq_v2 and marlin"
            )
        config.only("is_marlin_format", (False,))
        config.only("pack_dtype", ("int32",))
        _refuse_overrides(config)
        self._is_first, self._ordered = version == _FIRST, config.flag("desc_act", default=False)
        self.plain_modules = module_names(config, ("modules_to_not_convert",))
        self.title = f"{version.upper()} with {self._bits} bits {of_groups(self._group)}"

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        each = WORD_BITS // self._bits
        words, n = module.matrix(self.main, "I32")
        k = words * each
        if n % each:
            raise module.fault(self.main, f"has {n} outputs, which words of {each} numbers do not divide")
        groups = group_count(module, self.main, k, self._group)
        module.expect("qzeros", "I32", (groups, n // each))
        module.expect("scales", FLOATS, (groups, n))
        if module.has("g_idx") or (self._ordered and self._group != WHOLE_ROW):
            module.expect("g_idx", "I32", (k,))
        return n, k

    def check(self, module: QuantizedModule) -> None:
        groups = module.scales("scales", signed=True).shape[0]
        if module.has("g_idx"):
            module.groups("g_idx", groups)

    def read(self, module: QuantizedModule) -> ScaledNumbers:
        scales = module.scales("scales", signed=True)
        numbers = unpacked(module.read(self.main).T, self._bits)
        words = module.read("qzeros")
        zeros = unpacked(words + _ONES[self._bits] if self._is_first else words, self._bits).T
        k = numbers.shape[1]
        groups = (
            module.groups("g_idx", len(scales)) if module.has("g_idx") else columns_in_groups(k, self._group)
        )
        dtype = difference_dtype(self._bits)
        return ScaledNumbers(
            numbers.to(dtype).sub_(zeros.to(dtype)[:, groups]), scales.T.contiguous(), groups
        )


def gptq_format(config: Fields) -> WeightFormat:
    """The format of `quant_method` "gptq". Raises ModelError."""
    version = config.get("checkpoint_format", config.get("format", _FIRST))
    if version == "marlin" or config.flag("is_marlin_format", default=False):
        return MarlinFormat(config)
    return GptqFormat(config)


def _refuse_overrides(config: Fields) -> None:
    """GPTQModel's `dynamic`: modules that are not quantized ("-:pattern") are read as they are.

    Raises ModelError for modules with a configuration of their own.
    """
    given = config.get("dynamic", {})
    if not isinstance(given, dict):
        raise config.fault(f"dynamic is {shown(given)}, expected an object")
    for pattern in given:
        if not pattern.startswith("-"):
            raise config.fault(f"dynamic {shown(pattern)} is not supported, only modules to leave out (-:)")
