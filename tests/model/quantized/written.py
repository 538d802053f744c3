"""Tiny models whose linear layers a test has quantized, beside transformers' of the dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.tiny import save, save_random

PAGE = 16
TOLERANCE = 1e-4
TOKENS = np.random.default_rng(8).integers(3, 211, 50).tolist()

Matrix: TypeAlias = NDArray[np.float32]
Tensors: TypeAlias = dict[str, torch.Tensor]
Quantize: TypeAlias = Callable[[np.random.Generator, Matrix], tuple[Tensors, Matrix]]
"""(rng, weight [n, k]) to tensors by their suffix, and the weight that they stand for."""


def write(
    name: str | PretrainedConfig | Callable[[Path], PreTrainedModel],
    path: Path,
    quantize: Quantize,
    config: Mapping[str, Any],
    plain: tuple[str, ...] = ("lm_head",),
) -> PreTrainedModel:
    """A model with quantized linear layers but for some; returns transformers' model of it.

    `name`: of tests.model.tiny, or a random model's config, or what saves a model.
    """
    if callable(name):
        theirs = name(path)
    else:
        theirs = save(name, path) if isinstance(name, str) else save_random(name, path)
    file, rng = path / "model.safetensors", np.random.default_rng(5)
    tensors, meant = load_file(file), {}
    for key in sorted(tensors):
        module = key.removesuffix(".weight")
        if (
            module == key
            or not module.endswith(("_proj", "lm_head", "mlp.gate"))
            or module.endswith(plain)
            or "vis" in module
        ):
            continue
        made, meant[key] = quantize(rng, tensors.pop(key).numpy())
        tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in made.items()}
    assert meant
    save_file(tensors, file)
    set_config(path, quantization_config=dict(config))
    put(theirs, meant)
    return theirs


def put(model: PreTrainedModel, weights: Mapping[str, Matrix]) -> None:
    """Give transformers' model these weights, in which experts are stacked."""
    state = model.state_dict()
    for name, weight in weights.items():
        value = torch.from_numpy(weight)
        if name not in state and ".experts." not in name:  # of a model that takes images, too
            layer = name.partition("model.layers.")[2]
            name = f"model.language_model.layers.{layer}"
        if name in state:
            state[name].copy_(value)
            continue
        before, _, after = name.partition(".experts.")
        expert, part, _ = after.split(".")
        if part == "down_proj":
            state[before + ".experts.down_proj"][int(expert)].copy_(value)
        else:
            half = state[before + ".experts.gate_up_proj"][int(expert)].chunk(2)
            half[part == "up_proj"].copy_(value)


def set_config(path: Path, **changes: Any) -> None:
    """Change fields of config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_quantization(path: Path, **changes: Any) -> None:
    """Change fields of the quantization_config; None removes one."""
    given = json.loads((path / "config.json").read_text())["quantization_config"] | changes
    set_config(path, quantization_config={k: v for k, v in given.items() if v is not None})


def change_tensors(path: Path, change: Callable[[Tensors], Any]) -> None:
    """Rewrite the tensors."""
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def copied(model: Path, to: Path) -> Path:
    """The same files elsewhere, to be changed."""
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def loaded(path: Path, dtype: str = "float32") -> TorchBackend:
    """Our backend with this model."""
    backend = TorchBackend(TorchConfig(path, dtype=dtype, threads=1))
    backend.load(lambda what, done: None)
    return backend


def our_logits(backend: TorchBackend) -> NDArray[np.float32]:
    """Logits of TOKENS, in one piece."""
    backend.allocate(16, PAGE)
    driver = Driver(pages_from(1), PAGE)
    return logits_of(backend.forward([driver.feed(TOKENS, outputs=len(TOKENS))])[0])


def their_logits(model: PreTrainedModel) -> NDArray[np.float32]:
    """Logits of TOKENS by transformers."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(logits).max() > 0.5  # flat logits would prove nothing
    return logits


def assert_equal(path: Path, theirs: PreTrainedModel) -> None:
    """The loaded model has the logits of transformers' model."""
    backend = loaded(path)
    try:
        assert np.abs(our_logits(backend) - their_logits(theirs)).max() < TOLERANCE
    finally:
        backend.close()


def refused(path: Path, *words: str) -> None:
    """The model is refused when its files are opened, before a weight is read."""
    try:
        open_checkpoint(path).close()
    except ModelError as error:
        message = str(error)
    else:
        raise AssertionError("the model was not refused")
    for word in words:
        assert word in message, message
