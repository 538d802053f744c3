"""E10: NVIDIA's own tools over a step: memory errors and races by compute-sanitizer, counters by ncu."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from tests.gpu.bench import Bench, Case
from tests.gpu.machine import ROOT

_COUNTERS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "dram__bytes_read.sum": "read_bytes",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "programs",
}
_NCU = (
    "ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off",
    "--metrics",
)  # fmt: skip
_FOUND = 9  # the exit status by which compute-sanitizer says that it found something


def run(bench: Bench) -> Iterator[Case]:
    """A case for each tool of compute-sanitizer, then one for each kernel of a decode step, by ncu.

    It fails at the end if the sanitizer found anything. A tool that is not installed is skipped.
    """
    wrong = []
    for tool in ("memcheck", "racecheck"):
        case: Case = {"way": f"compute-sanitizer {tool}"}
        if reason := _missing("compute-sanitizer", bench):
            yield case | {"skipped": reason}
            continue
        # Without torch's caching each tensor is an allocation of its own: what is read beyond it is found.
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND)]
        done = _step(command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        case |= {"status": done.returncode, "end": done.stdout[-1500:]}
        if done.returncode:
            case["failed"] = done.stdout[-1000:]
            wrong += [tool] if done.returncode == _FOUND else []
        yield case
    for shape, rows in (("Qwen3-8B", 1), ("Qwen3-8B", 32)):
        case = {"way": "ncu", "shape": shape, "rows": rows}
        if reason := _missing("ncu", bench):
            yield case | {"skipped": reason}
            continue
        done = _step([*_NCU, ",".join(_COUNTERS)], "--shape", shape, "--rows", str(rows))
        kernels = _kernels(done.stdout)
        yield from (case | kernel for kernel in kernels)
        if not kernels:
            yield case | {"failed": done.stdout[-1000:]}
    if wrong:
        raise AssertionError(f"compute-sanitizer found something: {', '.join(wrong)}")


def _missing(tool: str, bench: Bench) -> str:
    if bench.device.type != "cuda":
        return f"{tool} needs a GPU"
    return "" if shutil.which(tool) else f"{tool} is not installed"


def _step(command: list[str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, sys.executable, "-m", "tests.gpu.one_step", *arguments],
        cwd=ROOT, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip


def _kernels(text: str) -> list[Case]:
    """Of ncu's table, which has a line for each kernel and counter, after what the program printed."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels: dict[str, Case] = {}
    for line in csv.DictReader(io.StringIO("\n".join(lines))):
        kernel = kernels.setdefault(line["ID"], {"kernel": line["Kernel Name"][:80]})
        name = _COUNTERS.get(line["Metric Name"])
        if name is not None:
            kernel[name] = float(line["Metric Value"].replace(",", ""))
    return list(kernels.values())
