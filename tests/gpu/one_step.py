"""`python -m tests.gpu.one_step`: a few steps on a GPU in a process of its own, for tools that watch it.

Without arguments: rows of every kind on tiny models, launched kernel by kernel. --shape NAME: after a
warm-up, one step of --rows decodes on two layers of this shape, between cudaProfilerStart and -Stop.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.run.warmup_rows import rows_of_every_kind
from tests.gpu.bench import PAGE, Bench
from tests.gpu.e3_step import decodes, pages_of_decode


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(torch.device(arguments.device), arguments.shape is None, Path(directory), {})
        if arguments.shape is None:
            for name in ("Qwen3-8B", "Qwen3-30B-A3B"):
                _every_kind(bench, name)
        else:
            _profiled(bench, arguments.shape, arguments.rows, arguments.context)


def _every_kind(bench: Bench, name: str) -> None:
    backend = bench.backend(name, 64 * PAGE)
    vocabulary = backend.info.vocab_size
    backend.launch(ForwardRows(rows_of_every_kind(vocabulary, -1))).outputs()
    backend.forward(decodes(backend, 2, PAGE))
    backend.close()


def _profiled(bench: Bench, name: str, rows: int, context: int) -> None:
    backend = bench.backend(name, rows * pages_of_decode(context) * PAGE, layers=2)
    step = decodes(backend, rows, context)
    backend.forward(step)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    backend.forward(step)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    backend.close()


if __name__ == "__main__":
    main()
