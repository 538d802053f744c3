"""Cost of adapters in decoding steps of the torch backend, as ratios to steps of the model as it is.

usage: python -m tests.bench.adapters MODEL [--dtypes float32,int8] [--rank 16] [--rounds 40] [--cpu-time]
Adapters change all linear layers. In each round every case computes one step, in an order that turns, and is
compared with the same round's step without adapters; medians and quartiles of these ratios are printed.
With `--cpu-time` one thread's time on a core is measured, for machines that do other work.
    off      the calls of adapters were not recorded (another model in the same process)
    none     no row has an adapter; the others are compared with this one
    one-row  one row has an adapter
    one      all rows have the same adapter
    many     the rows have 8 adapters in turn
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from executor_service.adapters.weights import LowRankChange, make_weights
from executor_service.backends.base import ForwardRow
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cpu.layers import recorded_blocks
from executor_service.backends.torch_backend.ops.low_rank import NO_CHANGES
from executor_service.contract.plan import Sampling
from tests.bench.step_time import PAGE, rows_of
from tests.support.untyped import present

ADAPTERS = 8


def loaded(model: Path, dtype: str, threads: int) -> TorchBackend:
    """A backend with its weights."""
    backend = TorchBackend(TorchConfig(model, dtype=dtype, threads=threads))
    backend.load(lambda what, done: None)
    return backend


def load_adapters(backend: TorchBackend, rank: int) -> int:
    """Random adapters of all linear layers in the slots; the bytes of one."""
    rng = np.random.default_rng(0)
    linears = present(present(backend.info.adapters).linears)
    for slot in range(ADAPTERS):
        changes = []
        for (layer, name), (inputs, outputs) in linears.items():
            a = (rng.standard_normal((rank, inputs)) / np.sqrt(inputs)).astype(np.float32)
            b = (rng.standard_normal((outputs, rank)) * 0.01).astype(np.float32)
            changes.append(LowRankChange(layer, name, a, b))
        prepared = backend.prepare_adapter(make_weights(rank, 2.0, changes, b""))
        backend.load_adapter(slot, prepared)
    size: int = prepared.bytes
    return size


def with_slots(rows: Sequence[ForwardRow], slots: Sequence[int]) -> list[ForwardRow]:
    """The rows, with these slots in turn."""
    return [replace(row, slot=slots[i % len(slots)]) for i, row in enumerate(rows)]


def step_ms(backend: TorchBackend, rows: Sequence[ForwardRow], clock: Callable[[], float]) -> float:
    """Duration of a step."""
    begin = clock()
    backend.forward(rows)
    return (clock() - begin) * 1e3


def summary(ratios: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return [round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4)]


def measure(model: Path, dtype: str, args: argparse.Namespace) -> None:
    """Print the figures of one dtype."""
    threads, clock = (1, time.thread_time) if args.cpu_time else (args.threads, time.perf_counter)
    backend = loaded(model, dtype, threads)
    with patch.object(recorded_blocks, "recorded_changes", lambda layer, shrunk: _no_changes()):
        off = loaded(model, dtype, threads)
    plain = rows_of(args.rows, 1, args.context, Sampling(), backend.info.vocab_size)
    for one in (backend, off):
        one.allocate(1 + args.rows * (-(-(args.context + 1) // PAGE)), PAGE)
        one.forward(rows_of(args.rows, args.context, 0, Sampling(), one.info.vocab_size))
    size = load_adapters(backend, args.rank)
    cases = {
        "none": (backend, plain),
        "off": (off, plain),
        "one-row": (backend, [replace(plain[0], slot=0), *plain[1:]]),
        "one": (backend, with_slots(plain, [0])),
        "many": (backend, with_slots(plain, range(ADAPTERS))),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(args.rounds + 2):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            duration = step_ms(*cases[name], clock)
            if turn >= 2:
                times[name].append(duration)
    figures: dict[str, dict[str, object]] = {
        name: {
            "ms": round(statistics.median(found), 2),
            "cost": summary([one / base for one, base in zip(found, times["none"], strict=True)]),
            "throughput": round(statistics.median(times["none"]) / statistics.median(found), 3),
        }
        for name, found in times.items()
    }
    head = {"dtype": dtype, "rows": args.rows, "rank": args.rank, "adapter_bytes": size}
    print(json.dumps(head), flush=True)
    for name, figure in figures.items():
        print(json.dumps({"case": name} | figure), flush=True)
    for one in (backend, off):
        one.close()


def _no_changes() -> object:
    from executor_service.backends.torch_backend.cpu.layers.threaded_linear import NO_ROW_CHANGES

    return NO_CHANGES._replace(
        qkv=NO_ROW_CHANGES, output=NO_ROW_CHANGES, gated=NO_ROW_CHANGES, down=NO_ROW_CHANGES
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="float32,int8")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    for dtype in args.dtypes.split(","):
        measure(args.model, dtype, args)


if __name__ == "__main__":
    main()
