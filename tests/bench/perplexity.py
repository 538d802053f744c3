"""Perplexity of the torch backend's dtypes on one text, and how often they choose the same token.

usage: python -m tests.bench.perplexity MODEL [--dtypes float32,int8] [--windows 48] [--tokens 512]
`cuda-int8` is what int8 is on CUDA, computed here; fp8 and bfloat16 are the same on both but for how sums are
taken, and slow on CPU. A format of pages comes behind a plus: int8+int8 is `--dtype int8 --kv-dtype int8`.
`float32+fp8`, which no device has, is fp32 but for pages of fp8, in plain torch.
The text is Python's reference as `pydoc` carries it: prose, tables and code. Windows are spread over all of
it; every token but a window's first is scored, from what precedes it in the window.
Prints a JSON object for each dtype, compared with those of float32, bfloat16 and int8 that came before.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.ops.kernels import Kernels, PlainKernels
from executor_service.backends.torch_backend.ops.quantized import Int8

_CUDA_INT8, _FP8_PAGES = "cuda-int8", "float32+fp8"
_BASES = ("float32", "bfloat16", "int8")


class SameInt8(Int8):
    """The same sums, of integers in fp64: `torch._int_mm` is slow on a CPU without VNNI."""

    def sums(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.double() @ weight.T.double()).to(torch.int32)


class CudaInt8(TorchBackend):
    """int8 as on CUDA: weights by output channel, inputs of 16 bits by row, all else in bf16."""

    def _kernels(self) -> Kernels:
        return PlainKernels(torch.device("cpu"), torch.bfloat16, SameInt8())


class Fp8Pages(TorchBackend):
    """fp32, but for pages of fp8."""

    def _kernels(self) -> Kernels:
        return PlainKernels(torch.device("cpu"), torch.float32, cache_dtype=torch.float8_e4m3fn)


@dataclass
class Scores:
    """Of all windows end to end: the tokens' negative log likelihoods, and the likeliest tokens."""

    losses: NDArray[np.float64]
    choices: NDArray[np.int64]


def score(backend: TorchBackend, windows: list[NDArray[np.int32]]) -> Scores:
    """Score every window by itself."""
    losses, choices = [], []
    for window in windows:
        logits = torch.from_numpy(backend.forward_once([window], frozenset({"logits"}))[0].logits)[:-1]
        target = torch.from_numpy(window[1:].astype(np.int64))
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none").double().numpy())
        choices.append(logits.argmax(-1).numpy())
    return Scores(np.concatenate(losses), np.concatenate(choices))


def backend_of(model: Path, dtype: str) -> TorchBackend:
    """Not loaded yet."""
    if dtype == _CUDA_INT8:
        return CudaInt8(TorchConfig(model, dtype="int8"))
    if dtype == _FP8_PAGES:
        return Fp8Pages(TorchConfig(model, kv_dtype="fp8"))
    dtype, _, kv_dtype = dtype.partition("+")
    return TorchBackend(TorchConfig(model, dtype=dtype, kv_dtype=kv_dtype or "auto"))


def windows_of(tokenizer: Tokenizer, count: int, tokens: int) -> list[NDArray[np.int32]]:
    """`count` windows at equal distances."""
    ids = np.array(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))).ids, np.int32)
    starts = np.linspace(0, len(ids) - tokens, count).astype(int)
    return [ids[start : start + tokens] for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="float32,int8")
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    bases: dict[str, Scores] = {}
    for dtype in args.dtypes.split(","):
        backend = backend_of(args.model, dtype)
        backend.load(lambda what, done: None)
        tokenizer = Tokenizer.from_str(backend.tokenizer().tokenizer_json.decode())
        found = score(backend, windows_of(tokenizer, args.windows, args.tokens))
        backend.close()
        row = {
            "dtype": dtype,
            "tokens": len(found.losses),
            "perplexity": round(math.exp(found.losses.mean()), 4),
        }
        for name, base in bases.items():
            ratio = math.exp(found.losses.mean() - base.losses.mean())
            row[f"to_{name}"] = {
                "change_percent": round(100 * (ratio - 1), 3),
                "same_choice_percent": round(100 * float((found.choices == base.choices).mean()), 2),
            }
        if dtype in _BASES:
            bases[dtype] = found
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
