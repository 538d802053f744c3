"""Step time of the torch backend by rows, split into linears, attention, sampler and the rest.

usage: python -m tests.bench.step_time MODEL [--rows 1,4,8,16,32,64] [--context 96] [--steps 15]
Prints a JSON object a line, in milliseconds. The split times each part of a step of its own, with nothing
between the calls: "other" is what is left of the greedy step.
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
from executor_service.backends.torch_backend import TorchBackend, TorchConfig
from executor_service.plan import OutputMode, Sampling

PAGE = 16
NUCLEUS = Sampling(temperature=0.8, top_p=0.95, seed=1)


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


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="1,4,8,16,32,64")
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    backend = TorchBackend(TorchConfig(args.model, threads=args.threads))
    backend.load(lambda what, done: None)
    model = backend._loaded()
    spec = model.spec
    for count in map(int, args.rows.split(",")):
        backend.allocate(1 + count * (-(-(args.context + 1) // PAGE)), PAGE)
        prompts = rows_of(count, args.context, 0, Sampling(), spec.vocab_size)
        backend.forward(prompts)
        rows = {
            name: rows_of(count, 1, args.context, sampling, spec.vocab_size)
            for name, sampling in (
                ("greedy", Sampling()), ("noise", Sampling(temperature=0.8, seed=1)), ("nucleus", NUCLEUS)
            )
        }  # fmt: skip
        steps = {name: median_ms(lambda r=r: backend.forward(r), args.steps) for name, r in rows.items()}  # type: ignore[misc]
        x = torch.randn(count, spec.hidden_size)
        qkv = torch.randn(count, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        from executor_service.backends.torch_backend.batch import lay_out
        from executor_service.backends.torch_backend import sampler

        batch = lay_out(rows["greedy"], PAGE, model.kernels.device)
        prepared = model.kernels.prepare(batch, spec.heads // spec.kv_heads)

        def linears() -> None:
            for layer in model.layers:
                layer.qkv(x)
                layer.output(x)
                layer.mlp.add(x, x.clone())
            model.head(x)

        def attention() -> None:
            for layer, cache in zip(model.layers, backend._caches, strict=True):
                model.kernels.attention(qkv, cache, prepared, layer.attention)

        logits = model.logits(model.hidden(batch, backend._caches))
        parts = {"linears": median_ms(linears, args.steps), "attention": median_ms(attention, args.steps)}
        for name, r in rows.items():
            parts["sampler_" + name] = median_ms(lambda r=r: sampler.sample(logits, r, model.kernels), args.steps)  # type: ignore[misc]
        parts["other"] = round(
            steps["greedy"] - parts["linears"] - parts["attention"] - parts["sampler_greedy"], 2
        )
        prefill = median_ms(lambda: backend.forward(prompts), 3)
        rate = round(count * args.context / prefill * 1e3)
        print(json.dumps({"rows": count, **steps, **parts, "prefill_tok_s": rate}), flush=True)


if __name__ == "__main__":
    main()
