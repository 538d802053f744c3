"""The commands of docs/tutorial-team.md, one after the other, as a reader types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.ports import kept_port
from tests.unit.docs.pages import Page

pytestmark = pytest.mark.commands

PAGE = Page.read(ROOT / "docs" / "tutorial-team.md")


def test_a_team_is_served_over_tls_with_tokens_and_a_renewed_certificate(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        for block in PAGE.shell:
            reader.type(block)
    finally:
        reader.end()
    assert "Paris" in reader.said
    assert '"object": "list"' in reader.said
    assert reader.said.count("ok: ") == 3, reader.said
    assert "the certificate was read again" in reader.log


class Reader:
    """Somebody with a terminal, and one for `paceline serve`, whose ports are others than the page's."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._port, self._exports = directory, kept_port(), ""
        self._ports = {":50051": f":{self._port}", ":8000": f":{kept_port()}"}
        programs = directory / "programs"
        programs.mkdir()
        (programs / "paceline").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paceline "$@"\n')
        (programs / "paceline").chmod(0o700)
        self._variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "clients" / "python"))),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PACELINE_MODELS": str(ROOT / ".models"),
        }
        self._serve: subprocess.Popen[bytes] | None = None
        self.said = ""

    @property
    def log(self) -> str:
        """What `paceline serve` said."""
        return (self._directory / "serve.log").read_text()

    def type(self, block: str) -> None:
        """Run the commands, whose variables stay for those that follow."""
        for port, free in self._ports.items():
            block = block.replace(port, free)
        if block.startswith("paceline serve "):
            self._start(block.split())
            return
        script = f"set -euo pipefail\n{self._exports}{block}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self._directory, env=self._variables, capture_output=True, text=True
        )
        self.said += done.stdout
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        self._exports += "".join(line for line in block.splitlines(True) if line.startswith("export "))

    def _start(self, words: list[str]) -> None:
        port = ["--port", str(self._port), "--port-file", "port", "-S", "log-level=info"]
        with (self._directory / "serve.log").open("wb") as log:
            self._serve = subprocess.Popen(
                [*words, *port], cwd=self._directory, env=self._variables, stdout=log, stderr=log
            )
        while not (self._directory / "port").exists():
            assert self._serve.poll() is None, self.log
            time.sleep(0.05)

    def end(self) -> None:
        """Ctrl-C to `paceline serve`."""
        if self._serve is not None:
            self._serve.send_signal(signal.SIGINT)
            self._serve.wait(120)
