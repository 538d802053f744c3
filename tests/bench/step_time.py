"""Step time of the torch backend by rows, split into linears, attention, sampler and the rest.

usage: python -m tests.bench.step_time MODEL [--dtypes float32,int8] [--rows 1,4,8,16,32,64] [--context 96]
Prints a JSON object a line, in milliseconds (medians); dtypes take turns, so that a drifting machine cancels.
Each part is timed alone, all layers of it in a row; "other" is what is left of the greedy step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.ops import sampler
from executor_service.backends.torch_backend.ops.row_tensors import Batch
from executor_service.contract.plan import OutputMode, Sampling

PAGE = 16
SAMPLINGS = {
    "greedy": Sampling(),
    "noise": Sampling(temperature=0.8, seed=1),
    "nucleus": Sampling(temperature=0.8, top_p=0.95, seed=1),
}


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median duration of a call in milliseconds, after one call to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 2)


def rows_of(count: int, tokens: int, context: int, sampling: Sampling, vocabulary: int) -> list[ForwardRow]:
    """`count` rows that feed `tokens` tokens after `context` cached ones, each with pages of its own."""
    rng = np.random.default_rng(0)
    pages = -(-(context + tokens) // PAGE)
    history = rng.integers(100, vocabulary, (count, context + tokens)).astype(np.int32)
    return [
        ForwardRow(
            start=context,
            tokens=history[i, context:],
            history=history[i],
            prompt_length=context,
            block_table=np.arange(1 + i * pages, 1 + (i + 1) * pages, dtype=np.int32),
            outputs=1,
            output=OutputMode.SAMPLE,
            sampling=sampling,
        )
        for i in range(count)
    ]


def measure(backend: TorchBackend, count: int, context: int, steps: int) -> dict[str, float]:
    """All figures for one number of rows."""
    model = backend.model
    spec, kernels = model.spec, model.kernels
    backend.allocate(1 + count * (-(-(context + 1) // PAGE)), PAGE)
    prompts = rows_of(count, context, 0, Sampling(), spec.vocab_size)
    prefill_ms = median_ms(lambda: backend.forward(prompts), 1)
    rows = {name: rows_of(count, 1, context, s, spec.vocab_size) for name, s in SAMPLINGS.items()}
    result: dict[str, float] = {}
    for name in rows:
        result[name] = median_ms(lambda name=name: backend.forward(rows[name]), steps)  # type: ignore[misc]
    batch = Batch.of(ForwardRows(rows["greedy"]), PAGE, kernels.device)
    prepared = model.prepare(batch)
    caches = model.new_caches(int(batch.tables.max()) + 1, PAGE)
    x = torch.randn(count, spec.hidden_size)
    qkv = torch.randn(count, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)

    def linears() -> None:
        for layer in model.layers:
            layer.qkv(x)
            layer.output(x)
            layer.mlp.add(x, x.clone())
        model.head(x)

    def attention() -> None:
        for layer, cache in zip(model.layers, caches, strict=True):
            kernels.attention(qkv, cache, prepared, layer.attention)

    with torch.inference_mode(), kernels.step():
        logits = model.logits(model.hidden(batch.tokens, batch.states, prepared, caches))
        result["linears"] = median_ms(linears, steps)
        result["attention"] = median_ms(attention, steps)
        for name in rows:
            result["sampler_" + name] = median_ms(
                lambda name=name: sampler.sample(logits, rows[name], kernels),  # type: ignore[misc]
                steps,
            )
    parts = result["linears"] + result["attention"] + result["sampler_greedy"]
    result["other"] = round(result["greedy"] - parts, 2)
    result["prefill_tok_s"] = round(count * context / prefill_ms * 1e3)
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Step time of the torch backend.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--rows", default="1,4,8,16,32,64")
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    backends = {}
    for dtype in args.dtypes.split(","):
        backends[dtype] = TorchBackend(TorchConfig(args.model, dtype=dtype, threads=args.threads))
        backends[dtype].load(lambda what, done: None)
    for count in map(int, args.rows.split(",")):
        for dtype, backend in backends.items():
            row = {"dtype": dtype, "rows": count, **measure(backend, count, args.context, args.steps)}
            print(json.dumps(row), flush=True)
    for backend in backends.values():
        backend.close()


if __name__ == "__main__":
    main()
