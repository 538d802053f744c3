"""No kernel begins before it may, in programmatic dependent launches."""

from __future__ import annotations

import ast
from pathlib import Path

from executor_service.backends.torch_backend import backend as backend_module

CUDA = Path(backend_module.__file__).parent / "cuda"


def test_every_kernel_that_is_launched_begins_with_begin_kernel() -> None:
    launched = 0
    for path in CUDA.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        for call in nodes:
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "Launch":
                continue
            kernel = functions[ast.unparse(call.args[0])]
            first = kernel.body[1] if ast.get_docstring(kernel) else kernel.body[0]
            assert ast.unparse(first) == "begin_kernel()", f"{path.name}: {kernel.name}"
            launched += 1
    assert launched >= 25
