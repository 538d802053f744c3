"""The commands and the Python of the pages are run, as a reader would, against real services.

The services listen on other ports than the pages say, models of billions of parameters are the default model
here, and what would run for ever is interrupted once it works.
"""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from paceline import Client

from tests.support.checkout import ROOT
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub
from tests.support.ports import kept_port
from tests.support.processes import executor
from tests.support.serve import Serve
from tests.unit.docs.pages import PAGES, Page

pytestmark = pytest.mark.commands

MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = """- {name: "alice", sha256: "0c1c0056c97ccb9fd1b3f163a8d8c9e26f8f3ea8281405b8c0d9602565ebc1ce"}\n"""
ANSWER = """{"pattern": ".", "text": "Paris."}\n"""
ELSEWHERE = {
    "make": "steps of .ci/run",
    "pip": "the package is installed from this tree, by make install",
    "pipx": "as pip",
    "uv": "as pip",
}
READ = [Page.read(path) for path in PAGES if path.name != "tutorial-team.md"]  # which has a test of its own
COMMANDS = sorted(
    {tuple(words) for page in READ for words in page.block_commands() if words[0] not in ELSEWHERE}
)
SERVICES = [words for words in COMMANDS if words[:2] == ("paceline", "serve") or "executor_service" in words]
ENDLESS = [
    ("paceline", "steps"),
    ("paceline", "timeline"),
    ("paceline", "timeline", "--web"),
    ("paceline", "timeline", "FILE", "--web"),
]
DRILL = ("python", "examples/drill.py")
WATCHES = [words for words in COMMANDS if "--watch" in words or words in ENDLESS or words[:2] == DRILL]
CALLS = [words for words in COMMANDS if words not in (*SERVICES, *WATCHES)]
BLOCKS = [
    pytest.param(block, id=f"{page.path.name}-{i}") for page in READ for i, block in enumerate(page.python)
]
OF_SEVERAL_MODELS = [("paceline", "load"), ("paceline", "unload"), ("paceline", "ps")]
"""Commands that need an address of several models."""
SEVERAL_MODELS = "models: [{name: chat}, {name: embedder, on-demand: true}]\n"
_TIMEOUT_S = 900.0
TINY = b"GGUF" + bytes(60)
TINY_URL = "https://example.com/tiny.Q4_K_M.gguf"
TINY_SHA256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
HUB = {
    "Qwen/Qwen3-0.6B": {"config.json": b"{}", "model.safetensors": struct.pack("<Q", 2) + b"{}"},
    "Qwen/Qwen3-0.6B-GGUF": {"Qwen3-0.6B-Q8_0.gguf": TINY},
    "example/tiny": {"tiny.Q4_K_M.gguf": TINY},
}
"""Stands in for a hub, and for a web server."""


def name(words: object) -> str:
    return " ".join(words) if isinstance(words, tuple) else ""


class Reader:
    """Somebody who copies what the pages say into a shell."""

    def __init__(
        self, directory: Path, scheduler: str, executor: str, scripted: str, several: str, hub: FakeHub
    ) -> None:
        self.directory, self._several = directory, several
        self._places = {
            "127.0.0.1:50051": scheduler,
            "127.0.0.1:50061": executor,
            "127.0.0.1:50062": scripted,
            "HOST:PORT": executor,
            TINY_URL: f"{hub.endpoint}/example/tiny/resolve/main/tiny.Q4_K_M.gguf",
            TINY_SHA256: hashlib.sha256(TINY).hexdigest(),
            "~/models/Qwen3-8B": str(MODEL),
            "~/models/Qwen3-0.6B": str(MODEL),
        }
        path = os.pathsep.join((str(ROOT), str(ROOT / "clients" / "python")))
        self._variables = {
            **os.environ,
            "PYTHONPATH": path,
            "PACELINE_ADDRESS": scheduler,
            "PACELINE_MODELS": str(directory / "models"),
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_CACHE": str(directory / "hub"),
        }
        (directory / "models").mkdir()
        (directory / "models" / MODEL.name).symlink_to(MODEL)
        cached(directory / "hub", "Qwen--Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf").symlink_to(MODEL)
        cached(directory / "hub", "Qwen--Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf").write_bytes(TINY)
        (directory / "tokens.yaml").write_text(TOKENS)
        (directory / "answers.jsonl").write_text(ANSWER)
        (directory / "examples").symlink_to(ROOT / "examples")
        (directory / "tests").symlink_to(ROOT / "tests")
        (directory / "adapters").mkdir()

    def here(self, text: str) -> str:
        """The text, with what is elsewhere on this machine."""
        for there, here in self._places.items():
            text = text.replace(there, here)
        return text

    def start(
        self, words: tuple[str, ...], log: Path | int, *, cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """The command, with its output in a file or terminal, and one line to read."""
        programs = {
            "paceline": [sys.executable, "-m", "paceline"],
            "python": [sys.executable],
            "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(ROOT)],
        }
        command = [*programs[words[0]], *map(self.here, words[1:])]
        address = {"PACELINE_ADDRESS": self._several} if words[:2] in OF_SEVERAL_MODELS else {}
        with open(log, "wb", closefd=not isinstance(log, int)) as output:
            process = subprocess.Popen(
                command,
                cwd=cwd or self.directory,
                env=self._variables | address,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        assert process.stdin is not None
        process.stdin.write(b"Hello\n")
        process.stdin.close()
        return process


def cached(cache: Path, repository: str, name: str) -> Path:
    """Where a hub's cache has a file of a repository that was fetched before."""
    folder = cache / f"models--{repository}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    return folder / "snapshots" / COMMIT / name


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so its children
    directory = tmp_path_factory.mktemp("reader")
    serve = Serve(directory)
    alone = executor("--backend", "oracle", directory=directory / "executor")
    script = ("--backend", "script", "--script", str(ROOT / "examples" / "own_speculator.jsonl"))
    scripted = executor(*script, directory=directory / "scripted")
    (models := directory / "several_models.yaml").write_text(SEVERAL_MODELS)
    (directory / "several_models").mkdir()
    several = Serve(directory / "several_models", str(models))
    try:
        plain, telling = (one.wait_serving().address for one in (alone, scripted))
        with Client(serve.address) as client:
            client.complete("Hello", max_tokens=1, request_id="ID")  # the id that pages give for one's own
        with fake_hub() as hub:
            hub.files = HUB
            found = Reader(directory, serve.address, plain, telling, several.address, hub)
            steps = "paceline", "steps", "--last", "60", "--seconds", "1", "-o", "FILE"  # for who reads it
            assert found.start(steps, directory / "steps.log").wait(_TIMEOUT_S) == 0
            yield found
    finally:
        alone.terminate()
        scripted.terminate()
        for service in (serve, several):
            service.process.send_signal(signal.SIGINT)
            service.process.wait(60)


@pytest.mark.parametrize("words", CALLS, ids=name)
def test_a_command_that_calls_a_service_works(reader: Reader, words: tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = reader.start(words, log, cwd=ROOT if words[0] == "pytest" else None)
    assert process.wait(_TIMEOUT_S) == 0, log.read_text()
    assert log.read_text().strip()


@pytest.mark.parametrize("words", WATCHES, ids=name)
def test_a_command_that_watches_shows_something_and_ends_with_ctrl_c(
    reader: Reader, words: tuple[str, ...]
) -> None:
    screen, terminal = os.openpty()
    process = reader.start(words, terminal)
    os.close(terminal)
    assert os.read(screen, 1 << 16)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # the terminal is gone with its last writer
        while os.read(screen, 1 << 16):
            pass
    assert process.wait(60) in (0, 130)
    os.close(screen)


@pytest.mark.parametrize("words", SERVICES, ids=name)
def test_a_command_that_starts_a_service_serves_and_ends(
    reader: Reader, words: tuple[str, ...], tmp_path: Path
) -> None:
    log, port_file = tmp_path / "log", tmp_path / "port"
    port = ("--port", str(kept_port()), "--port-file", str(port_file))
    process = reader.start(
        (*(word for word in words if word not in ("--port", "50061", "50062")), *port), log
    )
    until(port_file.exists, process, log)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0, log.read_text()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_python_runs(reader: Reader, block: str, tmp_path: Path) -> None:
    source = reader.here(block).replace("10.0.0.1:50051", reader.here("127.0.0.1:50051"))
    source = source.replace("10.0.0.2:50051", reader.here("127.0.0.1:50051"))
    if "async with" in source and "asyncio.run(" not in source:
        body = "".join(f"    {line}\n" for line in source.splitlines())
        source = f"import asyncio\n\nasync def block():\n{body}\nasyncio.run(block())\n"
    (tmp_path / "block.py").write_text(
        source if "import paceline" in source else "import paceline\n" + source
    )
    log = tmp_path / "log"
    process = reader.start(("python", str(tmp_path / "block.py")), log)
    assert process.wait(_TIMEOUT_S) == 0, log.read_text()


def until(condition: object, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until it holds, or fail when the process ends before."""
    assert callable(condition)
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
