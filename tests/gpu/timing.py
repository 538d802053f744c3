"""Durations in milliseconds: by the clock with what the host does, and of the device alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], object]
_WARM_UPS = 3


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(call: Call, device: torch.device, repeats: int) -> float:
    """Median of a call that ends when the device has finished, host time included."""
    for _ in range(_WARM_UPS):
        call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def device_ms(calls: Sequence[Call], device: torch.device, repeats: int = 10) -> float:
    """Median of one of these calls, replayed one after the other from one CUDA graph; on CPU by the clock.

    Give enough calls, each with data of its own, that none finds its data in the L2 cache.
    """

    def all_of_them() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return wall_ms(all_of_them, device, repeats) / len(calls)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, and lets libraries choose and allocate
            all_of_them()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    times = []
    for _ in range(_WARM_UPS + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[_WARM_UPS:]) / len(calls)


def repeated_ms(call: Call, repeats: int) -> float:
    """Of one of so many calls on a CUDA device, one after the other, by events around all of them."""
    for _ in range(_WARM_UPS):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def kernels_of(call: Call, device: torch.device) -> dict[str, Any]:
    """What the device did in one call: how many kernels, for how long, and each by name, heaviest first."""
    if device.type != "cuda":
        return {}
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    call()
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize(device)
    except RuntimeError as error:  # not every machine lets a program read its device's counters
        return {"profile_failed": str(error)[:1000]}
    kernels = [e for e in profiler.key_averages() if e.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    return {
        "kernels": sum(e.count for e in kernels),
        "kernel_ms": round(sum(e.self_device_time_total for e in kernels) / 1e3, 4),
        "heaviest": [
            {"name": e.key[:80], "calls": e.count, "ms": round(e.self_device_time_total / 1e3, 4)}
            for e in kernels
        ],
    }
