"""The host's CPU time for a decode step inside the executor, by rows; needs the triton extra, and no GPU.

    python -m tests.bench.host_time [--rows 1,32,128,256] [--steps 60] [--rounds 15] [--sampled]
                                    [--beside 'COMMAND']

From the bytes of a request to the bytes of its answer, two steps in flight: parse, decode, begin (reserve
rows, fill the step's buffer, launch), finish (read, commit), encode, serialize. The device is a clock that is
always done, so `DeviceRunner`'s own work counts and that of drivers does not. Printed are medians in µs.

--beside runs COMMAND, another tree's, which for each line of its input measures a round and prints a JSON
object of µs by rows, as this program does with --by-line. Rounds alternate, and the ratios of pairs are
printed with their quartiles.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.limits import Limits
from executor_service.contract.plan import Opening, Sampling, StepPlan
from executor_service.rpc.codec.results import encode_result
from executor_service.rpc.codec.rows import UNIFIED
from executor_service.rpc.codec.steps import decode_step
from executor_service.steps.engine import Engine
from tests.support.clocked_runner import VOCABULARY, ClockedRunner, CpuClock, no_kernels
from tests.support.engine_steps import BegunStep, begin

PAGE, PAGES, CONTEXT, PROMPT, MAX_TOKENS = 16, 60_000, 40_960, 1024, 512
WARM_UP = 4  # steps
PARTS = ("parse", "decode", "begin", "finish", "encode", "serialize")


class Case:
    """An engine with `rows` decoding sequences."""

    def __init__(self, rows: int, *, sampled: bool) -> None:
        backend: Any = ClockedRunner(CpuClock(), PAGES + 1, PAGE, CONTEXT)
        backend.max_piece_tokens = 1 << 20
        self._limits = Limits(
            VOCABULARY, CONTEXT, PAGE, PAGES, max_sequences=1024, max_rows=1024, max_step_tokens=1 << 20,
            max_piece_tokens=1 << 20,
        )  # fmt: skip
        self._engine = Engine(backend, self._limits, epoch=1)
        self._session = self._engine.open_session(0, 3_600_000, "bench").id
        self._rows, self._length, self._step_id = rows, PROMPT, 1
        prompts = np.random.default_rng(0).integers(0, VOCABULARY, (rows, PROMPT), np.int32)
        openings = tuple(
            Opening(
                i + 1, prompt, PROMPT, 0,
                Sampling(temperature=0.8, top_p=0.9, seed=i) if sampled else Sampling(),
            )
            for i, prompt in enumerate(prompts)
        )  # fmt: skip
        begin(self._engine, StepPlan(self._session, 1, 1, b"1", openings=openings)).finish()
        backend.capture(rows, MAX_TOKENS, lambda what, done: None)

    def run(self, steps: int) -> dict[str, float]:
        """Median µs of CPU time of each part of a step, and of the whole."""
        spent: dict[str, list[float]] = defaultdict(list)
        ahead = self._begin(defaultdict(list))
        for n in range(WARM_UP + steps):
            behind = self._begin(spent)
            assert len(self._engine.pipeline) == 2, "a step waits for the one before it"
            self._finish(ahead, spent)
            ahead = behind
            if n < WARM_UP:
                spent.clear()
        self._finish(ahead, defaultdict(list))
        spent["total"] = [sum(step) for step in zip(*(spent[part] for part in PARTS), strict=True)]
        return {part: statistics.median(times) * 1e6 for part, times in spent.items()}

    def _begin(self, spent: dict[str, list[float]]) -> tuple[StepPlan, BegunStep]:
        request = self._request()
        message = _timed(spent["parse"], lambda: pb.StreamUnifiedDecodeRequest.FromString(request))
        plan = _timed(spent["decode"], lambda: decode_step(message.step, self._limits, UNIFIED))
        return plan, _timed(spent["begin"], lambda: begin(self._engine, plan))

    def _finish(self, step: tuple[StepPlan, BegunStep], spent: dict[str, list[float]]) -> None:
        plan, begun = step
        result = _timed(spent["finish"], begun.finish)
        response = pb.StreamUnifiedDecodeResponse()
        _timed(spent["encode"], lambda: encode_result(response.result, result, plan, 1))
        _timed(spent["serialize"], response.SerializeToString)
        assert len(response.result.rows.tokens) == self._rows, response

    def _request(self) -> bytes:
        """The bytes of the next step."""
        self._step_id += 1
        request = pb.StreamUnifiedDecodeRequest()
        header, rows = request.step.header, request.step.rows
        header.session_id, header.step_id, header.epoch = self._session, self._step_id, 1
        rows.cache_ids.extend(range(1, self._rows + 1))
        rows.kv_lengths.extend([self._length] * self._rows)
        self._length += 1
        return request.SerializeToString()


def _timed(times: list[float], call: Callable[[], Any]) -> Any:
    began_s = time.thread_time()
    result = call()
    times.append(time.thread_time() - began_s)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,32,128,256")
    parser.add_argument("--steps", type=int, default=60, help="of a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sampled", action="store_true", help="temperature and top-p instead of greedy rows")
    parser.add_argument("--beside", metavar="COMMAND")
    parser.add_argument("--by-line", action="store_true", help="a round for each line of the input")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with no_kernels():
        cases = {rows: Case(rows, sampled=options.sampled) for rows in map(int, options.rows.split(","))}
        gc.collect()
        gc.freeze()  # as services do
        if options.by_line:
            for _ in sys.stdin:
                found = {rows: case.run(options.steps)["total"] for rows, case in cases.items()}
                print(json.dumps(found), flush=True)
        else:
            _compare(cases, options)


def _compare(cases: dict[int, Case], options: argparse.Namespace) -> None:
    """Run all rounds, alternating with the command, and print the medians."""
    peer = None
    if options.beside:
        peer = subprocess.Popen(
            shlex.split(options.beside), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    found: dict[int, list[dict[str, float]]] = {rows: [] for rows in cases}
    for _ in range(options.rounds):
        theirs: dict[str, float] = _round_of(peer) if peer is not None else {}
        for rows, case in cases.items():
            mine = case.run(options.steps)
            if str(rows) in theirs:
                mine |= {"beside": theirs[str(rows)], "ratio": mine["total"] / theirs[str(rows)]}
            found[rows].append(mine)
    if peer is not None:
        peer.terminate()
    for rows, rounds in found.items():
        medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        line = "  ".join(f"{name} {value:.0f}" for name, value in medians.items() if name != "ratio")
        if "ratio" in medians:
            low, _, high = statistics.quantiles([one["ratio"] for one in rounds], n=4)
            line += f"  ratio {medians['ratio']:.2f} ({low:.2f} to {high:.2f})"
        print(f"{rows:4} rows: {line}", flush=True)


def _round_of(peer: subprocess.Popen[str]) -> dict[str, float]:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write("\n")
    peer.stdin.flush()
    found: dict[str, float] = json.loads(peer.stdout.readline())
    return found


if __name__ == "__main__":
    main()
