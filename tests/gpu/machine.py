"""Where a run ran: the device, the driver, the libraries, the commit."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.gpu.bench import Bench, Case

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "numba", "llvmlite", "grpcio",
    "protobuf", "pydantic", "typing-extensions", "uvloop", "matplotlib", "flashinfer-python",
)  # fmt: skip
_CODE = ("executor_service", "scheduler_service", "clients/python", "tests/gpu", "tests/bench")


def describe() -> dict[str, Any]:
    """All that is known without touching the device."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "driver": _output(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
        ),
        "cpus": os.cpu_count(),
        "commit": _output("git", "rev-parse", "HEAD"),
        "changed_files": len(_output("git", "status", "--porcelain").splitlines()),
        "code": _digest(),
        "arguments": sys.argv[1:],
    }


def run(bench: Bench) -> Iterator[Case]:
    """An experiment: whether there is a device, and which."""
    if bench.device.type != "cuda":
        yield {"device": str(bench.device)}
        return
    properties = torch.cuda.get_device_properties(bench.device)
    torch.ones(8, device=bench.device).sum().item()
    yield {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "bf16": torch.cuda.is_bf16_supported(),
    }


def _digest() -> str:
    """Of the code that runs, since a copy of a checkout may have no commit."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """What a command says; "" where there is no such command, or it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
