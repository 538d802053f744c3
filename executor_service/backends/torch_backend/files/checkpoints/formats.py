"""From a config.json's `quantization_config` to the tensors of its directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from executor_service.backends.torch_backend.files.checkpoints.awq import AwqFormat
from executor_service.backends.torch_backend.files.checkpoints.compressed_tensors import (
    CompressedTensorsFormat,
)
from executor_service.backends.torch_backend.files.checkpoints.fp8 import Fp8Format
from executor_service.backends.torch_backend.files.checkpoints.gptq import gptq_format
from executor_service.backends.torch_backend.files.checkpoints.quantized_directory import QuantizedDirectory
from executor_service.backends.torch_backend.files.checkpoints.weight_format import (
    METADATA,
    WeightFormat,
    module_names,
)
from executor_service.backends.torch_backend.files.safetensors_dir import SafetensorsDirectory
from executor_service.files.fields import Fields, shown
from executor_service.files.safetensors_header import FLOATS

FORMATS: Mapping[str, Callable[[Fields], WeightFormat]] = {
    "fp8": Fp8Format,
    "gptq": gptq_format,
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
}
"""Formats by their `quant_method`."""
_KEY = "quantization_config"
MXFP4 = "MXFP4"
"""The title of stacked experts in blocks of 4 bits, which `PackedExperts` reads."""

TensorDirectory = SafetensorsDirectory | QuantizedDirectory
"""A directory's tensors, quantized or not."""


def open_directory(path: Path, config: Mapping[str, Any], where: str) -> TensorDirectory:
    """The tensors of a directory with this config.json, which `where` names. Raises ModelError."""
    f = Fields(config, where)
    given = f.get(_KEY, None)
    text = config.get("text_config")
    if isinstance(text, Mapping) and (inside := text.get(_KEY)) is not None:  # some write it there
        if given not in (None, inside):
            raise f.fault(f"{_KEY} is not that of text_config")
        given = inside
    if given is None:
        return SafetensorsDirectory(path)
    if not isinstance(given, Mapping):
        raise f.fault(f"{_KEY} is {shown(given)}, expected an object")
    q = Fields(given, f"{where}: {_KEY}")
    method = q.get("quant_method", "bitsandbytes" if _is_bitsandbytes(given) else None)
    if method is None:
        raise q.fault("quant_method is missing")
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        module_names(q, ["modules_to_not_convert"])
        q.ignore(*METADATA)
        q.refuse_unread()
        return SafetensorsDirectory(path, FLOATS | {"U8"}, MXFP4)
    if not isinstance(method, str) or method not in FORMATS:
        raise q.fault(f"quant_method {shown(method)} is not supported, only {', '.join(FORMATS)}")
    form = FORMATS[method](q)
    q.ignore(*METADATA)
    q.refuse_unread()
    return QuantizedDirectory(path, form)


def _is_bitsandbytes(config: Mapping[str, Any]) -> bool:
    """Whether the fields are those that transformers wrote for bitsandbytes before it wrote the method."""
    return any(key.startswith(("load_in_", "_load_in_", "bnb_")) for key in config)
