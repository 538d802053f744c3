"""`QuantizedDirectory`: the tensors of a directory whose linear layers are quantized.

What is quantized is what the files have in the format's tensors: everything else is read as it is, whatever
the configuration says. A module that the configuration excludes must not be quantized.
"""

from __future__ import annotations

from pathlib import Path

import torch

from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.checkpoints.weight_format import WeightFormat
from executor_service.backends.torch_backend.files.safetensors_dir import SafetensorsDirectory, ShardTensor
from executor_service.backends.torch_backend.files.scaled_numbers import Weight, plain
from executor_service.contract.model_error import ModelError
from executor_service.files.safetensors_header import FLOATS, QUANTIZED

_WEIGHT = "weight"


class QuantizedDirectory:
    """As `SafetensorsDirectory`, with a weight [n, k] in the place of each quantized module's tensors.

    Raises ModelError for tensors that do not fit the format or the configuration, before a weight is read.
    """

    def __init__(self, path: Path, form: WeightFormat) -> None:
        self.title, self._format = form.title, form
        self._store = SafetensorsDirectory(path, FLOATS | QUANTIZED)
        self.files = self._store.files
        try:
            self._modules = self._find_modules()
            self.tensors = self._find_tensors()
            if not self._modules:
                raise ModelError(f"{path.name}: no weight is quantized as quantization_config says")
            for module in self._modules.values():
                form.check(module)
        except Exception:
            self.close()
            raise

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor or a part of it, in its stored dtype, or dequantized to fp32. Raises ModelError."""
        return plain(self.read_weight(name, part))

    def read_weight(self, name: str, part: tuple[slice, ...] | None = None) -> Weight:
        """A tensor or a part of it; a quantized weight as numbers and scales. Raises ModelError."""
        module = self._modules.get(name.removesuffix("." + _WEIGHT))
        if module is None or not name.endswith("." + _WEIGHT):
            return self._store.read(name, part)
        weight = self._format.read(module)
        return weight if part is None else weight.part(*part)

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._store.close()

    def _find_modules(self) -> dict[str, QuantizedModule]:
        main, modules = self._format.main, {}
        for name, tensor in self._store.tensors.items():
            module, _, suffix = name.rpartition(".")
            if suffix != main or (main == _WEIGHT and tensor.dtype in FLOATS):
                continue
            modules[module] = QuantizedModule(module, self._store)
            if module in self._format.plain_modules:
                raise modules[module].fault(main, "is quantized, but the configuration excludes its module")
            if main != _WEIGHT and modules[module].has(_WEIGHT):
                raise modules[module].fault(_WEIGHT, f"is there beside {module}.{main}")
        return modules

    def _find_tensors(self) -> dict[str, ShardTensor]:
        form, tensors = self._format, {}
        for name, module in self._modules.items():
            file = self._store.tensors[f"{name}.{form.main}"].file
            tensors[f"{name}.{_WEIGHT}"] = ShardTensor("F32", form.shape(module), file)
        for name, tensor in self._store.tensors.items():
            owner, _, suffix = name.rpartition(".")
            module = QuantizedModule(owner, self._store)
            if owner in self._modules and suffix in (form.main, *form.beside):
                continue
            if suffix in form.unused:
                continue
            if suffix in form.beside:
                raise module.fault(form.main, f"is missing, or not quantized, beside {suffix}")
            module.entry(suffix, FLOATS)
            tensors[name] = tensor
        return tensors
