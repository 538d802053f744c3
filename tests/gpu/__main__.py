"""Checks and measures the CUDA worker: tokens, then E0 to E9, into one file over several calls.

    python -m tests.gpu [--only right|fast|why|check,E3] [--out DIR] [--earlier FILE] [--dry] [--minutes 9]

Random weights are made on the device: no model is needed, and no network. --only names experiments, or lists
of them for each of which one call of ten minutes has time; without it, all run as far as the minutes reach.
DIR/results.json has every case as soon as it is measured, and goes on with what it had, or with --earlier;
roofline and steps (PNG, SVG) show it. DIR is the environment's OUT, else bench-results/gpu. --dry runs the
same code on CPU with tiny shapes, to find mistakes: its times mean nothing.

Exit status: 0; 1 if anything that was asked for was not measured; 2 if there is no device, or for wrong
arguments. docs/gpu.md says how a first run goes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.gpu import lists

_LEAST_S = 15.0  # an experiment that has less time is not started
_PLOTS_S = 25.0  # kept for them and for the end


def _arguments() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "bench-results/gpu"))
    parser.add_argument("--earlier", type=Path, help="results.json to go on with")
    parser.add_argument("--dry", action="store_true", help="on CPU, tiny")
    parser.add_argument("--only", default=",".join(lists.LISTS), help="lists or experiments")
    parser.add_argument("--minutes", type=float, default=9.0, help="no experiment goes on for longer")
    arguments = parser.parse_args()
    try:
        arguments.names = lists.names_of(arguments.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    if (earlier := arguments.earlier) is not None:
        if not earlier.is_file():
            parser.error(f"--earlier: there is no file {earlier}")
        if (arguments.out / "results.json").exists():
            parser.error(f"--earlier: {arguments.out} has results already, and this call goes on with those")
        arguments.out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(earlier, arguments.out / "results.json")
    return arguments


def main() -> int:
    """Run what was asked for."""
    end = time.monotonic() - _PLOTS_S
    arguments = _arguments()
    end += 60 * arguments.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without its children
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers would look for kernels, and wait
    import torch  # not before the arguments are read: it takes seconds

    from tests.gpu import machine, runner, tables
    from tests.gpu.bench import Bench
    from tests.gpu.report import Report

    device = torch.device("cpu" if arguments.dry else "cuda:0")
    report = Report(arguments.out, machine.describe(), dry=arguments.dry)
    outcomes: dict[str, runner.Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as directory:
        for name in arguments.names:
            experiment = lists.experiment(name)
            left = end - time.monotonic()
            if left < _LEAST_S:
                outcome = runner.Outcome(experiment.title, "not started", error="the minutes are used up")
            else:
                bench = Bench(device, arguments.dry, Path(directory), report.found)
                # How long a dry run takes says how busy the machine is, and whether kernels are compiled yet.
                most_s = left if arguments.dry else min(experiment.most_s, left)
                outcome = runner.run(experiment, bench, most_s, partial(report.keep, name))
            report.keep(name, outcome)
            outcomes[name] = outcome
            print(tables.line_of(name, outcome), flush=True)
            if name == "device" and not outcome.measured:
                return 2
    for line in tables.figures(report.found):
        print(line)
    files = report.plot()
    print("written:", report.out / "results.json", *files)
    for line in tables.outcomes(outcomes):
        print(line)
    return int(not all(outcome.measured for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
