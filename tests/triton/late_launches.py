"""What rows with penalties, masks, logprobs, scores or vectors cost a step in launches, on a fake device.

`python -m tests.triton.late_launches` prints the launches after a step by the number of rows that want
something, and fails where they grow with it, where the host reads from the device, or where faults that are
injected are not found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from executor_service.backends.base import ForwardRow, PromptOutputs
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.layout.host_buffers import Parts
from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep
from executor_service.backends.torch_backend.cuda.layout.resolve import TokenPages, new_resolved
from executor_service.backends.torch_backend.cuda.layout.row_ends import RowEnds
from executor_service.backends.torch_backend.cuda.layout.rows import Tiling
from executor_service.backends.torch_backend.cuda.layout.step_buffer import Picked
from executor_service.backends.torch_backend.cuda.picking import late_picks
from executor_service.backends.torch_backend.cuda.picking.late_picks import LatePicks
from executor_service.backends.torch_backend.cuda.run import prompt_vectors
from executor_service.backends.torch_backend.cuda.run.prompt_vectors import PromptVectors
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.shard import Whole
from executor_service.contract.masks import mask_bytes
from executor_service.contract.plan import OutputMode, Sampling
from tests.gpu.shapes import spec_of
from tests.triton.dry.fake_device import DEVICE, Weights
from tests.triton.launch_counts import Launches, counted_launches

PAGE, HISTORY, ROWS = 16, 40, 256
COUNTS = (1, 2, 16, ROWS)  # rows that want something


def decode(sampling: Sampling, output: OutputMode = OutputMode.SAMPLE) -> ForwardRow:
    """A row that feeds the last token of a history."""
    history = np.ones(HISTORY, np.int32)
    table = np.arange(1, 4, dtype=np.int32)
    return ForwardRow(HISTORY - 1, history[-1:], history, 9, table, 1, output, sampling, top_k=5)


def prompt(outputs: PromptOutputs) -> ForwardRow:
    """A row that feeds 4 tokens of a prompt."""
    return replace(
        decode(Sampling(logprobs=5), OutputMode.NONE),
        start=0, tokens=np.ones(4, np.int32), history=np.ones(4, np.int32), outputs=0, prompt=outputs,
    )  # fmt: skip


def kinds(vocab_size: int) -> dict[str, ForwardRow]:
    """What a row can want, by name."""
    masks = np.full((1, mask_bytes(vocab_size)), 255, np.uint8)
    penalties = Sampling(repetition_penalty=1.1, frequency_penalty=0.5)
    everything = replace(
        penalties, temperature=0.8, top_p=0.9, logit_bias=((5, 1.0),), stop_token_ids=(2,), min_tokens=99,
        logprobs=5,
    )  # fmt: skip
    return {
        "penalties": decode(penalties),
        "logit bias": decode(Sampling(logit_bias=((5, 1.0), (7, -1.0)))),
        "min_tokens": decode(Sampling(stop_token_ids=(2, 3), min_tokens=99)),
        "mask": replace(decode(Sampling()), masks=masks),
        "logprobs": decode(Sampling(logprobs=5)),
        "all of these": replace(decode(everything), masks=masks),
        "top-k": decode(Sampling(), OutputMode.TOP_K),
        "all logits": decode(Sampling(), OutputMode.FULL),
        "score of a token": prompt(PromptOutputs(4, np.ones(1, np.int32))),
        "vectors": prompt(PromptOutputs(last=True, total=True)),
    }


class FakeStep:
    """The device's side of a step, and what is enqueued after it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.model = Model(Weights(spec), CudaKernels(DEVICE, torch.bfloat16), lambda *_: None)
        history = TokenPages(100, PAGE, DEVICE)
        self._late = LatePicks(self.model, history, RowEnds.of(4096, DEVICE), Whole())
        self._tiling = Tiling.of(4, torch.bfloat16)

    def enqueue(self, rows: Sequence[ForwardRow]) -> None:
        """What `LaunchedStep` does with a step of these rows."""
        table = ForwardRows(rows)
        step = HostStep(table, PAGE, self._tiling)
        tokens, outputs = sum(len(row.tokens) for row in rows), sum(row.outputs for row in rows)
        residual = torch.empty(tokens, self.model.spec.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        picks = torch.empty(2, outputs, dtype=torch.int32, device=DEVICE)
        picked = Picked(new_resolved(tokens, outputs, DEVICE), picks[0], residual, picks)
        self._late.enqueue(table, range(len(rows)), picked, step, prompts=True)
        if prompt_vectors.wants_vectors(rows):
            PromptVectors(self.model, table, residual)


@contextmanager
def copies(launches: Launches) -> Iterator[None]:
    """Inside, copies are counted instead of made: what has no contents can't be filled by numpy."""

    def upload(parts: Parts, device: torch.device) -> dict[str, torch.Tensor]:
        launches.counts["copy to the device"] += 1
        types = {name: torch.float32 if a.dtype == np.float32 else torch.int32 for name, a in parts.items()}
        return {
            name: torch.empty(array.size, dtype=types[name], device=device) for name, array in parts.items()
        }

    def download(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == DEVICE
        launches.counts["copy to the host"] += 1
        return tensor

    with (
        mock.patch.multiple(late_picks, upload=upload, download=download),
        mock.patch.multiple(prompt_vectors, upload=upload, download=download),
    ):
        yield


def count(step: FakeStep, launches: Launches, rows: Sequence[ForwardRow]) -> int:
    """Launches and copies after a step of these rows."""
    launches.counts.clear()
    with copies(launches), launches:
        step.enqueue(rows)
    return launches.total


def faults(step: FakeStep) -> dict[str, Callable[[torch.Tensor], object]]:
    """Ways for the host to wait for the device, on a tensor of fp32."""
    return {
        "a number": lambda x: float(x.sum()),
        "a condition": lambda x: bool((x > 0).all()),
        "nonzero": lambda x: (x > 0).nonzero(),
        "a mask as index": lambda x: x[x > 0],
        "cpu()": lambda x: x.cpu(),
        "tolist()": lambda x: x.tolist(),
        "an index of the host": lambda x: x[torch.arange(1)],
        "a tensor of the host": lambda x: x + torch.ones(x.shape[-1]),
    }


def main() -> int:
    """Print the tables; the number of things that are not as they should be."""
    bad = 0
    spec = replace(spec_of("Qwen3-8B"), layers=1)
    with counted_launches() as launches:
        step = FakeStep(spec)
        plain = decode(Sampling(temperature=0.7, top_p=0.9))
        print(f"launches behind a step of {ROWS} rows, of which so many want something")
        print(f"    {'':20}" + "".join(f"{n:6}" for n in COUNTS))
        for name, row in {"nothing": plain, **kinds(spec.vocab_size)}.items():
            found = [count(step, launches, [row] * n + [plain] * (ROWS - n)) for n in COUNTS]
            differs = len(set(found)) > 1
            bad += differs
            print(f"{'BAD' if differs else '':3} {name:20}" + "".join(f"{n:6}" for n in found), flush=True)
        mixed = [*kinds(spec.vocab_size).values()]
        print(f"    {'each of these':20}{count(step, launches, mixed + [plain] * 9):6}")
        print("faults in the output layer that are not found:", end=" ")
        logits, missed = step.model.logits, []
        for name, fault in faults(step).items():

            def faulty(hidden: torch.Tensor, fault: Callable[[torch.Tensor], object] = fault) -> torch.Tensor:
                found = logits(hidden)
                fault(found)
                return found

            with mock.patch.object(step.model, "logits", faulty):
                try:
                    count(step, launches, [kinds(spec.vocab_size)["logprobs"]])
                except Exception:
                    continue
            missed.append(name)
        print(", ".join(missed) or "none")
    return bad + len(missed)


if __name__ == "__main__":
    sys.exit(main() > 0)
