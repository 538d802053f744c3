"""Programmatic dependent launch: which devices have it, and that no kernel starts too early."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend import backend as backend_module
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.kernel_choice import dependent_launch

CUDA = Path(backend_module.__file__).parent / "cuda"


def test_devices_without_it_are_refused_before_a_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="programmatic-dependent-launch on is for CUDA; the device is 'cpu'"):
        TorchBackend(TorchConfig(Path(), programmatic_dependent_launch=True))._kernels()
    capability, device = (torch.cuda, "get_device_capability"), torch.device("cuda:0")
    monkeypatch.setattr(*capability, lambda device: (8, 9))
    with pytest.raises(ModelError, match=r"dependent-launch on needs .* 9\.0; 'cuda:0' has 8\.9"):
        dependent_launch(device, wanted=True)
    assert not dependent_launch(device, wanted=None)
    monkeypatch.setattr(*capability, lambda device: (9, 0))
    assert dependent_launch(device, wanted=True)
    assert dependent_launch(device, wanted=None)
    assert not dependent_launch(device, wanted=False)
    assert not dependent_launch(torch.device("cpu"), wanted=None)


def test_every_kernel_that_is_launched_begins_with_begin_kernel_or_asks_for_weights_before_it() -> None:
    launched = 0
    for path in CUDA.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        for call in nodes:
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "Launch":
                continue
            kernel = functions[ast.unparse(call.args[0])]
            body = [ast.unparse(statement) for statement in kernel.body]
            body = body[1:] if ast.get_docstring(kernel) else body
            [begins] = [n for n, line in enumerate(body) if line.startswith("begin_kernel(")]
            before = "\n".join(body[:begins])
            calls = {ast.unparse(x.func) for x in ast.walk(ast.parse(before)) if isinstance(x, ast.Call)}
            allowed = {
                "tl.program_id",
                "tl.arange",
                "tl.minimum",
                "ask_for_rows",
                "ask_for_spans",
            }  # none reads memory
            assert calls <= allowed, f"{path.name}: {kernel.name}"
            launched += 1
    assert launched >= 25
