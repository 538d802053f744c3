"""Nodes of a Ray on this machine: a head without CPUs and three nodes, with directories of their own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from paceline_fleet.cluster import set_up_environment, start_node

from tests.support.checkout import environment

NODES = 3
_COMMAND_S = 400.0


@cache
def _token() -> str:
    """One for all clusters of this process: Ray reads it once."""
    return secrets.token_hex(32)


class ThreeNodes:
    """A fleet's spec, and the nodes on which it may be."""

    def __init__(self, directory: Path, short: Path) -> None:
        self.home, self.spec_file = directory / "home", directory / "spec.yaml"
        self.token_file = directory / "ray-token"
        self.token_file.touch(0o600)
        self.token_file.write_text(_token())
        set_up_environment(self.token_file)
        os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
        self._short, self._storage = short, directory / "state"
        self.head = start_node(short, storage=self._storage)
        self.nodes = [start_node(short, head=self.head.gcs_address, cpus=2) for _ in range(NODES)]

    def write_spec(self, **model: object) -> None:
        fields = {"name": "oracle", "backend": "oracle", "replicas": NODES, "drain_timeout_s": 2, **model}
        ray = {"address": self.head.gcs_address, "token_file": str(self.token_file)}
        spec = {"fleet": "chat", "home": str(self.home), "ray": ray, "models": [fields]}
        self.spec_file.write_text(yaml.safe_dump(spec))

    def fleet(self, *arguments: str) -> str:
        """The output of `paceline fleet` with these arguments, which must succeed."""
        words = ["fleet", arguments[0], str(self.spec_file), *arguments[1:]]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=_COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.fleet("status", "--json"))
        return found

    def kill_node(self, node_id: str) -> None:
        """End a node's raylet and agents with SIGKILL; Ray's workers on it end with it."""
        [node] = [node for node in self.nodes if node.node_id == node_id]
        self.nodes.remove(node)
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    def kill_head(self) -> int:
        """End the head as a node is ended; returns the port at which it listened."""
        port = int(self.head.gcs_address.rpartition(":")[2])
        self.head.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        return port

    def start_head(self, port: int) -> None:
        """Start a head on the lost one's state."""
        self.head = start_node(self._short, port=port, storage=self._storage)

    def controller(self) -> int | None:
        """The process of Serve's controller."""
        raylets = {node.all_processes["raylet"][0].process.pid for node in [self.head, *self.nodes]}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
                name = (directory / "cmdline").read_bytes()
            except OSError:
                continue
            if parent in raylets and name.startswith(b"ray::ServeController"):
                return int(directory.name)
        return None

    def close(self) -> None:
        for node in [*self.nodes, self.head]:
            node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


@contextmanager
def three_nodes(directory: Path) -> Iterator[ThreeNodes]:
    with tempfile.TemporaryDirectory(
        prefix="plr-", ignore_cleanup_errors=True
    ) as short:  # sockets' paths are short
        cluster = ThreeNodes(directory, Path(short))
        try:
            yield cluster
        finally:
            cluster.close()


def runs(pid: int) -> bool:
    """Whether a process is there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
