"""Checks and measures the CUDA worker in one go: tokens, then E0 to E9, into one folder.

    python -m tests.gpu [--out DIR] [--dry] [--only check,E0,E3] [--minutes 9]

Random weights are made on the device: no model is needed, and no network. DIR/results.json holds every case;
roofline and steps (PNG, SVG) show it. --dry runs the same code on CPU with tiny shapes, to find mistakes: its
times mean nothing. Exit status: 0; 1 if an experiment failed or had to be ended; 2 if there is no device.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.gpu import machine, runner
from tests.gpu.bench import Bench, Experiment
from tests.gpu.report import Report

_LEAST_S = 15.0  # an experiment that has less time is not started
_SPARE_S = 25.0  # kept for imports and plots


def _experiments() -> list[Experiment]:
    """In order of value: time may be up before the last."""
    table = (
        ("check", "tokens on the device, on CPU and in transformers", "check_tokens", 120),
        ("E0", "ceilings: copy and bf16 matmul", "e0_ceilings", 20),
        ("E3", "whole steps of the backend", "e3_step", 120),
        ("E5", "through gRPC, one and two steps in flight", "e5_service", 120),
        ("E8", "the same model in transformers", "e8_transformers", 130),
        ("E1", "linear layers: bf16, int8, fp8", "e1_linears", 45),
        ("E6", "bits: decode and verify, alone and in a batch", "e6_bits", 30),
        ("E9", "programmatic dependent launch, on and off", "e9_dependent_launch", 90),
        ("E2", "attention beside SDPA and FlashInfer", "e2_attention", 40),
        ("E7", "a mixture of experts", "e7_experts", 75),
        ("E4", "cold start, compile time and memory", "e4_loading", 90),
    )
    return [
        Experiment(name, title, importlib.import_module(f"tests.gpu.{module}").run, most_s)
        for name, title, module, most_s in table
    ]


def main() -> int:
    """Run what was asked for."""
    experiments = _experiments()
    names = [experiment.name for experiment in experiments]
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-results/gpu"))
    parser.add_argument("--dry", action="store_true", help="on CPU, tiny")
    parser.add_argument("--only", default=",".join(names), help="in this order, with commas between")
    parser.add_argument("--minutes", type=float, default=9.0, help="no experiment goes on for longer")
    arguments = parser.parse_args()
    chosen = {name: experiments[names.index(name)] for name in arguments.only.split(",") if name in names}
    if unknown := set(arguments.only.split(",")) - set(names):
        parser.error(f"--only: no experiment {', '.join(sorted(unknown))}; there are {', '.join(names)}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without its children
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers would look for kernels, and wait
    end = time.monotonic() + 60 * arguments.minutes - _SPARE_S
    device = torch.device("cpu" if arguments.dry else "cuda:0")
    report = Report(arguments.out, machine.describe(), dry=arguments.dry)
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as directory:

        def run(experiment: Experiment) -> runner.Outcome:
            bench = Bench(device, arguments.dry, Path(directory), report.found)
            left = end - time.monotonic()
            if left < _LEAST_S:
                outcome = runner.Outcome(experiment.title, "not started", error="the minutes are used up")
            else:
                # How long a dry run takes says how busy the machine is, and whether kernels are compiled yet.
                most_s = left if arguments.dry else min(experiment.most_s, left)
                outcome = runner.run(experiment, bench, most_s)
            report.add(experiment.name, outcome)
            print(
                f"{experiment.name:6} {experiment.title:47} {len(outcome.cases):3} cases"
                f" {outcome.seconds:6.1f} s  {outcome.status}  {outcome.line()}",
                flush=True,
            )
            return outcome

        if run(Experiment("device", "what there is", machine.probe, 60)).status != "done":
            return 2
        failed = [run(chosen[name]).status in ("failed", "ended") for name in chosen]
    for line in report.table():
        print(line)
    files = report.plot()
    print("written:", report.out / "results.json", *files)
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
