"""E5: steps through gRPC: the scheduler's loop with one and two in flight, and the public Generate.

Needs what the services need (grpcio-health-checking, grpcio-status, pydantic-settings, ...), which a machine
for measurements may lack: then it is left out, and says what is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tests.gpu.bench import DTYPE, PAGE, Bench, Case
from tests.gpu.floors import decode_floor_s
from tests.gpu.shapes import spec_of

_START_S = 75.0  # of a process; in less time than the experiment has, so that its log is seen
_STEP_TOKENS = 2048  # of prompts; what the scheduler puts into a step beside the decodes


def run(bench: Bench) -> Iterator[Case]:
    """Cases by rows: at the loop with one and two steps in flight, and through Generate.

    `executor_idle` is the share of time without a step to compute, `device_idle` that without a kernel to run
    by E3's count of as many rows, where this run has it.
    """
    from tests.bench.steps_in_flight import one_loop
    from tests.support.processes import ServiceProcess

    name = "Qwen3-8B"
    counts, context = bench.pick((32, 1, 128), (2,)), bench.pick(1024, 32)
    spec = spec_of(name, dry=bench.dry)
    # Room for what is decoded as well.
    pages = max(max(counts) * (context + bench.pick(1280, 2048)), bench.pick(16_384, 0)) // PAGE
    flags = ["--model", str(bench.model(name)), "--device", str(bench.device), "--dtype", DTYPE]
    flags += ["--pages", str(pages), "--threads", str(bench.threads)]
    executor = ServiceProcess("tests.gpu.random_executor", flags, bench.directory / "executor")
    try:
        executor.wait_serving(_START_S)
        with one_loop() as loop:
            for rows in counts:
                for case in _cases(bench, loop, executor.address, rows, context):
                    floor_ms = 1e3 * decode_floor_s(spec, rows, case["context"], bench.machine)
                    case |= {"floor_ms": floor_ms, "fraction": floor_ms / case["step_ms"]}
                    yield {"shape": name, **case, **_device_idle(bench, name, rows, case["step_ms"])}
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise RuntimeError(f"{error}\nthe executor's log:\n{executor.log[-4000:]}") from error
    finally:
        executor.kill()


def _device_idle(bench: Bench, shape: str, rows: int, step_ms: float) -> Case:
    alone = bench.decode_of(shape, rows)
    return {"device_idle": 1 - alone["kernel_ms"] / step_ms} if "kernel_ms" in alone else {}


def _cases(bench: Bench, loop: asyncio.Runner, address: str, rows: int, context: int) -> Iterator[Case]:
    from tests.bench.steps_in_flight import at_the_loop, equal

    seconds = bench.pick(3.0 + rows / 12, 1.0)
    outputs = []
    for depth in (1, 2):
        outcome = loop.run(
            at_the_loop(
                address, depth, rows, seconds, prompt=context, temperature=0.0, step_tokens=_STEP_TOKENS
            )
        )
        outputs.append(outcome.tokens)
        decoded = sum(map(len, outcome.tokens.values())) // rows
        yield {
            "way": "loop",
            "in_flight": depth,
            "rows": rows,
            "context": context + decoded // 2,
            "step_ms": 1e3 * outcome.step_s,
            "executor_idle": outcome.idle,
            "tokens_equal": equal(outputs[0], outputs[-1]),
        }
    yield _through_generate(bench, loop, address, rows, context)


def _through_generate(bench: Bench, loop: asyncio.Runner, address: str, rows: int, context: int) -> Case:
    from paceline.scheduler.v1 import scheduler_pb2 as pb

    from tests.bench.load import decode_tok_s, first_token_ms, run_streams
    from tests.support.processes import ServiceProcess

    flags = ["--executor", address, "--max-step-tokens", str(_STEP_TOKENS)]
    scheduler = ServiceProcess("scheduler_service", flags, bench.directory / f"scheduler-{rows}")
    # Many prompts are fed beside the first streams' decodes, and the rate is that of all streams at once.
    new = bench.pick(96 if rows == 1 else 900, 24)
    try:
        scheduler.wait_serving(_START_S)
        greedy = pb.SamplingParams(temperature=0.0)
        streams = loop.run(run_streams(scheduler.address, rows, context, new, greedy))
    finally:
        scheduler.kill()
    tokens_per_s = decode_tok_s(streams)
    return {
        "way": "Generate",
        "in_flight": "default",
        "rows": rows,
        "context": context + new // 2,
        "step_ms": 1e3 * rows / tokens_per_s,
        "tokens_per_s": tokens_per_s,
        "first_token_ms": first_token_ms(streams),
    }
