"""E8: the same shape in transformers: continuous batching, and a static cache with torch.compile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tests.gpu.bench import Bench, Case

_NAME = "Qwen3-8B"


def run(bench: Bench) -> Iterator[Case]:
    """Cases of decode tokens a second; `ours` is E3's step of as many rows, where this run has it."""
    import transformers

    transformers.logging.set_verbosity_error()
    context, new = bench.pick(1024, 24), bench.pick(48, 6)
    model = _model(bench)
    ways: list[tuple[str, Callable[..., float], tuple[int, ...]]] = [
        ("continuous batching", _continuous, bench.pick((32, 1, 128), (2,))),
        ("static cache, compiled", _static, bench.pick((1, 32), (1,))),
    ]
    for way, measure, counts in ways:
        for rows in counts:
            case: Case = {"shape": _NAME, "way": way, "rows": rows, "context": context}
            began = time.perf_counter()
            try:
                tokens_per_s = measure(model, _prompts(bench, model, rows, context), new)
            except Exception as error:  # one way that fails leaves the other
                yield case | {"failed": f"{type(error).__name__}: {error}"[:1000]}
                continue
            case |= {"tokens_per_s": tokens_per_s, "took_s": time.perf_counter() - began}
            yield case | _beside(bench, rows, tokens_per_s)


def _model(bench: Bench) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(bench.model(_NAME))
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def _prompts(bench: Bench, model: Any, rows: int, context: int) -> list[list[int]]:
    return np.random.default_rng(rows).integers(3, model.config.vocab_size, (rows, context)).tolist()


def _continuous(model: Any, prompts: list[list[int]], new: int) -> float:
    """Tokens a second while all sequences decode, by the times at which each token came."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options: dict[str, Any] = {"progress_bar": False, "record_timestamps": True}
    # It would take nine tenths of the memory.
    cpu = model.device.type == "cpu"
    bounds = {"num_blocks": 16, "max_batch_tokens": 64} if cpu else {"max_memory_percent": 0.4}
    options["continuous_batching_config"] = ContinuousBatchingConfig(**bounds)
    outputs = model.generate_batch(prompts, generation_config=config, **options)
    times = [output.timestamps for output in outputs.values()]
    if len(times) < len(prompts) or any(len(each) < new for each in times):
        raise RuntimeError(f"{len(times)} of {len(prompts)} sequences came back, or not whole")
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    if end <= begin:
        raise RuntimeError("the sequences never decoded all at once")
    return sum(begin < t <= end for each in times for t in each) / (end - begin)


def _static(model: Any, prompts: list[list[int]], new: int) -> float:
    """Tokens a second of decoding: what the longer of two generations took more."""
    from transformers import GenerationConfig

    ids = torch.tensor(prompts, device=model.device)

    def seconds(tokens: int) -> float:
        config = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static",
            pad_token_id=0,
        )  # fmt: skip
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    few = 2
    seconds(new)  # compiles
    seconds(few)
    gains = [seconds(new) - seconds(few) for _ in range(3)]
    return len(prompts) * (new - few) / statistics.median(gains)


def _beside(bench: Bench, rows: int, tokens_per_s: float) -> Case:
    if not (case := bench.decode_of(_NAME, rows)):
        return {}
    ours = 1e3 * rows / case["ahead_ms"]
    return {"ours_tokens_per_s": ours, "ours_to_theirs": ours / tokens_per_s}
