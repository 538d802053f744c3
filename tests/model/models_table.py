"""The table of families in docs/models.md, made by trying a tiny model of each.

usage: python -m tests.model.models_table
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file
from transformers import PreTrainedModel

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import DTYPES, TorchConfig
from executor_service.backends.torch_backend.examine import examined
from executor_service.backends.torch_backend.files.architecture.config_wrappers import (
    WRAPPERS,
    modules_beside,
    text_names,
)
from executor_service.backends.torch_backend.files.architecture.families import FAMILIES
from executor_service.backends.torch_backend.files.checkpoints.formats import FORMATS as QUANTIZED
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.quantized import test_mxfp4 as mxfp4
from tests.model.quantized.test_fp8 import CONFIG as FP8
from tests.model.quantized.test_fp8 import whole
from tests.model.quantized.written import write
from tests.model.tiny import ALL_CONFIGS, NEWER_CONFIGS, save
from tests.model.wrapped_models import save_wrapped

_HEAD = ("`model_type`", "GGUF", *DTYPES, "quantized checkpoints")
_WRAPPED_HEAD = ("`model_type`", "`model_type` in `text_config`", "not loaded")
_TINY = ALL_CONFIGS | NEWER_CONFIGS
_INSIDE = {
    text: kind for kind, wrapper in WRAPPERS.items() for text in wrapper.text if text == f"{kind}_text"
}
_SAVES: dict[str, Callable[[Path], PreTrainedModel]] = {
    **{text: partial(save_wrapped, kind, "plain") for text, kind in _INSIDE.items()},
    **{_TINY[name]().model_type: partial(save, name) for name in reversed(_TINY)},
}
"""What saves a tiny model of each `model_type`."""


def table() -> list[str]:
    """Its lines: a head, and a family in each."""
    with TemporaryDirectory() as directory:
        families = [_row(family, Path(directory) / family) for family in FAMILIES]
    return [_line(_HEAD), _line(["---"] * len(_HEAD)), *families]


def wrapped_table() -> list[str]:
    """The lines of the table of models that take images as well."""
    with TemporaryDirectory() as directory:
        rows = [_wrapped_row(kind, Path(directory) / kind) for kind in WRAPPERS]
    return [_line(_WRAPPED_HEAD), _line(["---"] * len(_WRAPPED_HEAD)), *rows]


def _wrapped_row(kind: str, path: Path) -> str:
    save_wrapped(kind, "plain", path)
    open_checkpoint(path).close()
    stored = [name for file in path.glob("*.safetensors") for name in load_file(file)]
    beside = modules_beside(stored, text_names(stored, kind))
    texts = WRAPPERS[kind].text
    return _line([f"`{kind}`", *(", ".join(f"`{name}`" for name in names) for names in (texts, beside))])


def _row(family: str, path: Path) -> str:
    _SAVES[family](path / "plain")
    found = examined(path / "plain")["dtypes"]
    loading = {dtype for dtype in DTYPES if _loads(path / "plain", dtype)}
    assert loading == set(found["cpu"])
    dtypes = [", ".join(name for name in ("CPU", "CUDA") if dtype in found[name.lower()]) for dtype in DTYPES]
    quantized = _quantized(family, path / "quantized")
    return _line([f"`{family}`", f"`{FAMILIES[family].gguf}`", *dtypes, quantized])


def _loads(path: Path, dtype: str) -> bool:
    backend = TorchBackend(TorchConfig(path, dtype=dtype, threads=1))
    try:
        backend.load(lambda what, done: None)
    except ModelError:
        return False
    finally:
        backend.close()
    return True


def _quantized(family: str, path: Path) -> str:
    """The formats, which differ in how they pack a weight, and not in which models they pack."""
    if FAMILIES[family].sinks:  # experts in one tensor have a format of their own
        mxfp4.write(path)
        return "mxfp4" if _loads(path, "float32") else ""
    write(_SAVES[family], path, whole, FP8)
    return ", ".join(QUANTIZED) if _loads(path, "float32") else ""


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


if __name__ == "__main__":
    print("\n".join([*table(), "", *wrapped_table()]))
