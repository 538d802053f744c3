"""`RandomBackend`: the torch backend on random weights, made on the device from a config.json alone."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.tensor_shapes import Part, expected_shapes
from executor_service.backends.torch_backend.files.weights import fingerprint
from executor_service.backends.torch_backend.model.model import Model
from executor_service.files.json_file import read_json


class RandomCheckpoint:
    """A `Checkpoint` whose tensors are drawn when they are read; a name's tensor is always the same."""

    quantization = None

    def __init__(self, path: Path, device: torch.device) -> None:
        self.name, self._device = path.name, device
        self.spec = spec_from_config(read_json(path / "config.json"), {}, "config.json")
        self._shapes = dict(expected_shapes(self.spec))

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """bf16: N(0, 1 / inputs), so that activations neither vanish nor grow; norms around 1."""
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
        if len(shape) > 1:
            tensor *= shape[-1] ** -0.5
        elif name.endswith("norm.weight"):
            tensor = 1 + 0.1 * tensor
        return tensor if part is None else tensor[part].clone()

    def read_weight(self, name: str, part: Part | None = None) -> torch.Tensor:
        """See `Checkpoint`."""
        return self.read(name, part)

    def files(self) -> list[Path]:
        """See `Checkpoint`."""
        return []

    def close(self) -> None:
        """See `Checkpoint`."""


class RandomBackend(TorchBackend):
    """All but the reading of files is the backend's own."""

    def _load(self, progress: Progress) -> None:
        kernels = self._kernels()
        checkpoint = RandomCheckpoint(self._config.model, kernels.device)
        with torch.inference_mode():
            self._model = Model(self._shard.cut(checkpoint), kernels, progress, self._shard)
        if kernels.low_rank is not None:
            self._adapters = self._new_adapters(kernels.low_rank)
        self.info = self._describe(checkpoint, fingerprint(checkpoint, [self._config.dtype], progress))

    def fill_caches(self) -> None:
        """Random keys and values everywhere: zeros would be measured faster than they are."""
        for cache in self._caches:
            cache.k.normal_()
            cache.v.normal_()
