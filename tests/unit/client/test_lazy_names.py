"""What `import paceline` gives, though a name's module is imported when the name is first used."""

from __future__ import annotations

import ast
import pickle
import pydoc
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import paceline
import pytest
from paceline.chat import ToolCall

from tests.support.checkout import environment


def test_checkers_see_the_names_that_programs_get_from_the_modules_they_get_them_from() -> None:
    tree = ast.parse(Path(paceline.__file__).read_text())
    [block] = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: f"{statement.module}.{alias.name}"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert sorted(seen) == sorted(paceline.__all__)  # modules too: `paceline.errors` without an import of it
    for name, path in seen.items():
        assert getattr(paceline, name) is pydoc.locate(path), name


def test_the_version_is_the_installed_packages() -> None:
    assert paceline.__version__ == metadata.version("paceline")


def test_star_imports_and_dir_have_all_names_and_help_describes_them() -> None:
    names: dict[str, object] = {}
    exec("from paceline import *", names)
    assert set(paceline.__all__) <= set(names)
    assert {*paceline.__all__, "errors", "__doc__"} <= set(dir(paceline))
    text = pydoc.render_doc(paceline, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    assert all(f"class {name}" in text for name in ("Client", "ExecutorClient", "Usage", "PacelineError"))


@pytest.mark.parametrize("name", paceline.__all__)
def test_help_of_every_public_name_says_what_it_is(name: str) -> None:
    value = getattr(paceline, name)
    generated = f"{name}("  # what dataclasses write where nobody did
    assert value.__doc__
    assert not (value.__doc__ or "").startswith(generated)


def test_help_of_the_options_describes_each() -> None:
    described = set(re.findall(r"^        (\w+): ", paceline.Options.__doc__ or "", re.MULTILINE))
    assert described == paceline.Options.__optional_keys__


def test_objects_are_pickled_and_unknown_names_are_refused() -> None:
    call = ToolCall("1", "add", "{}")
    assert pickle.loads(pickle.dumps(call)) == call
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'Cleint'"):
        paceline.Cleint  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "modules"),
    [
        ("import service_kit.logs, service_kit.model_name", {"service_kit"}),
        ("import paceline; paceline.errors.QueueFull", {"paceline.errors", "grpc", "google"}),
    ],
)
def test_what_a_name_needs_is_imported_with_it_and_not_before(statement: str, modules: set[str]) -> None:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert modules <= loaded
    assert loaded.isdisjoint({"grpc", "google", "paceline.client", "service_kit"} - modules)


def test_nothing_is_printed_when_a_connected_service_stops() -> None:
    """Of a program that uses Paceline; gRPC prints a line then by itself."""
    program = """
import socket, threading
import paceline
import grpc

def frame(kind, *numbers):
    payload = b"".join(number.to_bytes(4, "big") for number in numbers)
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload

def stop(server):
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(frame(4) + frame(7, 0, 2))  # SETTINGS; GOAWAY, as gRPC's server sends it
    connection.recv(4096)
    connection.close()

server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=stop, args=[server]).start()
channel = grpc.insecure_channel(f"127.0.0.1:{server.getsockname()[1]}")
try:
    channel.unary_unary("/a/b")(b"", timeout=0.3)
except grpc.RpcError:
    print("failed")
"""
    given = {name: value for name, value in environment().items() if name != "GRPC_VERBOSITY"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.stdout, ended.stderr) == ("failed\n", "")
