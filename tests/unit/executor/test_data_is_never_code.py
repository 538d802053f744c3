"""What a model's files, peers and clients send is data: nothing of it is ever run."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.unit.executor.model_files import write_model

ROOT = Path(__file__).parents[3]
PACKAGES = ("clients/python", "executor_service", "scheduler_service")
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "runpy", "code"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load")}
TORCH_PICKLES = {"send_object_list", "broadcast_object_list", "all_gather_object", "gather_object"}


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickled_checkpoint_is_refused_unopened(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / name).write_bytes(pickle.dumps(Payload(tmp_path / "was run")))
    with pytest.raises(ModelError, match="safetensors"):
        TorchBackend(TorchConfig(tmp_path / "model")).load(lambda what, done: None)
    assert not (tmp_path / "was run").exists()


def test_remote_code_that_a_config_names_is_not_run(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    fields = json.loads(config.read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    config.write_text(json.dumps(fields))
    (tmp_path / "model" / "modeling.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')")
    TorchBackend(TorchConfig(tmp_path / "model")).load(lambda what, done: None)
    assert not (tmp_path / "was run").exists()


def forbidden(tree: ast.AST) -> set[str]:
    """What in a module could turn bytes into code."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            found.update([node.module] if node.module and node.module.split(".")[0] in MODULES else [])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.add(node.func.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in ATTRIBUTES or node.attr in TORCH_PICKLES:
                found.add(f"{owner}.{node.attr}")
    return found


def test_no_module_can_unpickle_or_evaluate() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if (names := forbidden(ast.parse(path.read_text())))
    }
    assert not found


def test_the_search_finds_what_it_looks_for() -> None:
    text = "import pickle\nfrom marshal import loads\ntorch.load(x)\neval(y)\ndist.all_gather_object(z)"
    assert len(forbidden(ast.parse(text))) == 5
