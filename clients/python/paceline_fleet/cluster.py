"""The Ray of a fleet: one of its own on this machine, on loopback alone, or one that is there already.

`python -m paceline_fleet.cluster DIRECTORY` is a node of its own, which ends with its process and takes no
other Ray of this machine with it, as `ray stop` would. Whoever reaches Ray's ports runs code, so Ray asks for
a token, which it reads from a file.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.channel import is_loopback

from paceline_fleet.doctor import RayReport

LOOPBACK = "127.0.0.1"
_START_S = 240.0
_LOOK_S = 1.0
_TRIES = 3
"""Starts of a node, of which Ray gives up each after 30 s."""
_HEAD_LOST_S = 3600
"""Time that nodes, and the stacks on them, outlive the head."""


class FleetDownError(Exception):
    """The fleet's Ray isn't there; the message says what to do."""


def own_environment(token_file: Path) -> dict[str, str]:
    """What Ray reads from the environment of each process of a fleet's cluster."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_DEFAULT_HTTP_HOST": LOOPBACK,
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_HEAD_LOST_S),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_prestart_worker_first_driver": "0",  # a process for each CPU, which a fleet does not use
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def set_up_environment(token_file: Path) -> None:
    """Have Ray in this process and its children use the token of a file. Before `ray` is imported."""
    os.environ |= own_environment(token_file)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # the file counts
    os.environ.pop("RAY_ADDRESS", None)


class OwnCluster:
    """The files of a fleet's own Ray in the fleet's directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.token_file = directory / "ray-token"
        self._about = directory / "ray.json"

    @property
    def address(self) -> str:
        """Where the head listens. Raises FleetDownError if it does not run."""
        if self._pid() is None:
            raise FleetDownError("nothing of this fleet runs here: `paceline fleet up SPEC` starts it")
        return str(json.loads(self._about.read_text())["address"])

    def start(self, cpus: int) -> None:
        """Start the node, unless it runs, and wait for it. Raises FleetDownError with its last words."""
        if self._pid() is not None:
            return
        self._about.unlink(missing_ok=True)
        make_token(self.token_file)
        log = self._directory / "ray.log"
        command = [sys.executable, "-m", "paceline_fleet.cluster", str(self._directory), "--cpus", str(cpus)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + _START_S
        while not self._about.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise FleetDownError(f"Ray did not start: {lines[-1]} (all of it: {log})")
            time.sleep(0.1)

    def stop(self) -> None:
        """End the node and all of its processes, and wait for that."""
        pid = self._pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            while self._pid() is not None:
                time.sleep(0.1)
        self._about.unlink(missing_ok=True)

    def wrote(self, address: str) -> None:
        """Called by the node once it runs."""
        draft = self._about.with_suffix(".draft")
        draft.write_text(json.dumps({"address": address, "pid": os.getpid()}))
        draft.replace(self._about)

    def _pid(self) -> int | None:
        """The id of the node's process, if it runs."""
        with suppress(OSError, ValueError, KeyError):
            pid = int(json.loads(self._about.read_text())["pid"])
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"paceline_fleet.cluster" in words and str(self._directory).encode() in words:
                return pid
        return None


def make_token(path: Path) -> None:
    """Draw Ray's token, unless the file is there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def start_node(
    directory: Path,
    *,
    head: str = "",
    port: int = 0,
    storage: Path | None = None,
    cpus: int = 0,
    gpus: int | None = None,
) -> Any:
    """Start the processes of a node on loopback, of the cluster at `head`, else of a new one.

    `port` and `storage` are of a new one: where it listens (0: any), and the directory of its state, with
    which a later head at the same port goes on (embedded RocksDB: no second service to run and to guard).

    It is made without the `ray` command, which listens on the machine's own address when given
    loopback, and without the autoscaler's and the log's monitors, which listen on all.
    It ends with this process.
    """
    from ray._private import utils
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    # A node ends itself if its agents take longer than 15 s to start, as on a busy machine. The small
    # ones start sooner, and have no ports for HTTP and for metrics, which a fleet does not use.
    utils.get_dashboard_dependency_error = lambda: ImportError("not used")
    beginning: dict[str, Any] = {"gcs_address": head} if head else {"gcs_server_port": port}
    if storage is not None:
        beginning["_system_config"] = {"gcs_storage": "rocksdb", "gcs_storage_path": str(storage)}
    for left in reversed(range(_TRIES)):
        parameters = RayParams(
            node_ip_address=LOOPBACK,
            dashboard_host=LOOPBACK,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            min_worker_port=0,
            max_worker_port=0,
            node_manager_port=0,
            object_store_memory=100 << 20,  # Ray's least; the fleet has no objects
            temp_dir=str(directory),
            num_cpus=cpus,
            num_gpus=gpus,
            **beginning,
        )
        node: Any = Node.__new__(Node)
        try:
            node.__init__(parameters, head=not head, shutdown_at_exit=True, spawn_reaper=True)
        except Exception:  # Ray's are of many kinds
            if not left or not hasattr(node, "all_processes"):
                raise
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        else:
            break
    return node


def connect(address: str, token_file: Path) -> None:
    """Connect this process to a Ray cluster. Raises FleetDownError if it doesn't answer."""
    set_up_environment(token_file)
    import ray
    from ray._private import services, worker

    worker.print_to_stdstream = lambda *_, **__: None  # what nodes say would be among a command's output
    if is_loopback(address):  # Ray would replace it by the machine's own address, where nothing listens
        services.resolve_ip_for_localhost = lambda host: host
    try:
        ray.init(address=address, namespace="paceline", log_to_driver=False, logging_level="error")
    except Exception as error:  # Ray's are of many kinds
        raise FleetDownError(f"no Ray answers at {address}: {str(error).splitlines()[0]}") from None


def keeps_state() -> bool:
    """Whether the connected cluster's head has its state elsewhere than in its memory."""
    from ray._common.usage.usage_lib import get_extra_usage_tags_to_report
    from ray._private.worker import global_worker

    found: dict[str, str] = get_extra_usage_tags_to_report(global_worker.gcs_client)
    return found.get("gcs_storage", "memory") != "memory"


def ray_report(token_file: Path) -> RayReport:
    """What the connected cluster says of itself."""
    import ray

    have = ray.cluster_resources()
    return RayReport(
        nodes=sorted({str(one["NodeManagerAddress"]) for one in ray.nodes() if one["Alive"]}),
        cpus=have.get("CPU", 0.0),
        gpus=have.get("GPU", 0.0),
        keeps_state=keeps_state(),
        encrypts=os.environ.get("RAY_USE_TLS") == "1",
        token_file=token_file,
    )


def main() -> None:
    """Run a node with all that this machine has until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cpus", type=int, required=True)
    given = parser.parse_args()
    own = OwnCluster(given.directory)
    set_up_environment(own.token_file)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="plray-", ignore_cleanup_errors=True) as short:
        # The paths of Ray's sockets have to be short.
        state = given.directory / "ray-state"
        shutil.rmtree(state, ignore_errors=True)  # of a Ray whose stacks ended with it
        node = start_node(Path(short), cpus=given.cpus, storage=state)
        try:
            own.wrote(node.gcs_address)
            while True:
                time.sleep(_LOOK_S)
                if any(kind == "gcs_server" for kind, _ in node.dead_processes()):
                    node.kill_gcs_server(check_alive=False)  # forgets it
                    node.start_gcs_server()  # at the same port, with the same state
        finally:
            node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


if __name__ == "__main__":
    main()
