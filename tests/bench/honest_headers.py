"""How honest calls end, straight and through the proxies of Debian, with long metadata and many at once.

usage: python -m tests.bench.honest_headers [--calls 2000] [--json FILE]

A scheduler that demands a token, and an oracle. For each way (direct; nginx's `grpc_pass`; nghttpx; the last
two where they are installed: `apt-get install nginx-light nghttp2-proxy`): 200 and `--calls` calls at once on
one channel, without metadata and with 7 KiB of its own for each. Prints how they ended, and fails if one
ended otherwise than with OK or a refusal by the scheduler, which says why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from paceline.channel import Link, open_aio_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.support.ports import kept_port
from tests.support.stack import Stack

METADATA_BYTES = 7 << 10
LONG_CALLS = 200
_TOKEN = "a-token-for-honest-callers"  # of a service that lives for seconds
_NGINX = """\
daemon off;
pid {directory}/nginx.pid;
error_log {directory}/nginx.log;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {directory}; proxy_temp_path {directory}; fastcgi_temp_path {directory};
  uwsgi_temp_path {directory}; scgi_temp_path {directory};
  server {{
    listen 127.0.0.1:{port} http2;
    http2_max_concurrent_streams 4096;
    keepalive_requests 100000;
    location / {{ grpc_pass grpc://{address}; grpc_read_timeout 300s; }}
  }}
}}
"""


@contextmanager
def proxy(command: list[str], port: int) -> Iterator[str]:
    """A proxy that listens on this port; its address."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 10
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=until - time.monotonic())
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def nginx(directory: Path, address: str) -> tuple[list[str], int]:
    """A command that passes calls on to this address, and its port."""
    port, file = kept_port(), directory / "nginx.conf"
    file.write_text(_NGINX.format(directory=directory, port=port, address=address))
    return ["nginx", "-c", str(file)], port


def nghttpx(directory: Path, address: str) -> tuple[list[str], int]:
    """The same."""
    port, (host, _, upstream) = kept_port(), address.rpartition(":")
    streams = "--frontend-http2-max-concurrent-streams=4096"
    log = f"--errorlog-file={directory}/nghttpx.log"
    return [
        *("nghttpx", "--conf=/dev/null", "--workers=1", streams, log, "--accesslog-file=/dev/null"),
        *(f"-f127.0.0.1,{port};no-tls", f"-b{host},{upstream};;proto=h2"),
    ], port


async def ends(address: str, calls: int, metadata_bytes: int) -> tuple[Counter[str], float]:
    """How calls of one channel end that are made at once, and the seconds until the last has."""
    request = pb.GenerateRequest(text="x", stop=pb.StopConditions(max_tokens=4, ignore_eos=True))

    async def one(stub: Any) -> str:
        notes = [("x-notes", secrets.token_hex(metadata_bytes // 2))] if metadata_bytes else []
        call = stub.Generate(request, metadata=[("authorization", f"Bearer {_TOKEN}"), *notes], timeout=300)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    async with open_aio_channel(address, Link.PUBLIC) as channel:
        stub, began = rpc.SchedulerServiceStub(channel), time.monotonic()
        found = Counter(await asyncio.gather(*(one(stub) for _ in range(calls))))
        return found, time.monotonic() - began


def main() -> int:
    """Measure all ways; 1 if a call had an end without a reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as proxies:
        directory = Path(name)
        (token := directory / "token").write_text(_TOKEN)
        token.chmod(0o600)
        stack = Stack(directory)
        try:
            stack.start_executor()
            stack.start_scheduler("--auth-token-file", str(token))
            stack.scheduler.wait_serving()
            ways = {"direct": stack.scheduler.address}
            for make in (nginx, nghttpx):
                if shutil.which(make.__name__):
                    command, port = make(directory, stack.scheduler.address)
                    ways[make.__name__] = proxies.enter_context(proxy(command, port))
                else:
                    print(f"{make.__name__} is not installed")
            for way, address in ways.items():
                for calls, size in product((LONG_CALLS, arguments.calls), (0, METADATA_BYTES)):
                    found, seconds = asyncio.run(ends(address, calls, size))
                    refused = sum(n for end, n in found.items() if end.startswith("RESOURCE_EXHAUSTED: "))
                    bad = calls - found["OK"] - refused
                    print(
                        f"{way:8} {calls:5} calls with {size:5} bytes of metadata: {found['OK']} OK,"
                        f" {refused} refused, {bad} otherwise, {seconds:.1f} s",
                        *(f"\n    {n}: {end[:200]}" for end, n in found.items() if end != "OK"),
                        flush=True,
                    )
                    rows.append({"way": way, "calls": calls, "metadata_bytes": size, "otherwise": bad})
        finally:
            stack.kill()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    return int(any(row["otherwise"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
