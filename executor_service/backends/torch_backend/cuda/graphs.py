"""`Graphs`: steps captured once for each of some shapes, and replayed with other numbers.

A CUDA graph launches a step's thousand kernels at once. It repeats addresses, so what changes from step to
step lies in one buffer, at places that follow from the shape; a smaller step is padded. Steps that no shape
holds (long prompts, which keep the device busy for longer than their launches take) run without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.cuda.rows import SPLIT_TOKENS, Tiling
from executor_service.backends.torch_backend.cuda.step_buffer import StepBuffer, StepShape, numbers_of

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_VERIFIED = (1, 4, 9)  # tokens of a row: the last one and up to 8 drafts
_MOST_OUTPUTS = 512  # of a captured step: its logits are what takes memory
_CHUNKS, _CHUNK_ROWS = (64, 128, 256, 384, 512), (8, 32, 128)  # tokens of prompts, rows beside them
_OPENINGS = 8  # rows that such a chunk may be cut into
_SHARED = 4  # by how much the keys of rows that share prefixes may exceed all that there are


@dataclass(frozen=True, slots=True)
class Picked:
    """What a step leaves on the device."""

    hidden: torch.Tensor  # [outputs, hidden], after the final norm
    picks: torch.Tensor  # int32 [2, outputs]: the token of each output, and whether its logits were finite


Step = Callable[[StepBuffer], Picked]


class Captured(Protocol):
    """A captured step."""

    picked: Picked

    def replay(self) -> None:
        """Enqueue it again; `picked` then holds what this run left."""


class CudaGraph:
    """A step as a CUDA graph. All of a stream and pool share memory: each may overwrite what another left."""

    def __init__(self, step: Step, buffer: StepBuffer, stream: torch.cuda.Stream, pool: Any) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(buffer)  # compiles what was not yet, and lets libraries allocate
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self.picked = step(buffer)

    def replay(self) -> None:
        self._graph.replay()


class Rerun:
    """What stands for a CUDA graph where there is none: the same step on the same buffer, computed again."""

    def __init__(self, step: Step, buffer: StepBuffer) -> None:
        self._step, self._buffer = step, buffer
        self.picked = step(buffer)

    def replay(self) -> None:
        self.picked = self._step(self._buffer)


class Graphs:
    """Captured steps by shape, and the buffer that they all read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[StepShape, Captured] = {}
        self.buffer = torch.zeros(0, dtype=torch.int32, device=device)

    def capture(self, step: Step, shapes: Sequence[StepShape], progress: Progress) -> None:
        """Capture the step for each shape, the largest first, for the others then fit into its memory."""
        self.buffer = torch.zeros(max(map(numbers_of, shapes)), dtype=torch.int32, device=self._device)
        cuda = self._device.type == "cuda"
        # The allocator gives memory back to the stream that it came from alone: one stream for all.
        stream = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle() if cuda else None
        for done, shape in enumerate(sorted(shapes, key=_cost, reverse=True)):
            progress("capturing CUDA graphs", done / len(shapes))
            numbers = StepBuffer.padding(self.buffer, shape)
            graph = CudaGraph(step, numbers, stream, pool) if stream is not None else Rerun(step, numbers)
            self._captured[shape] = graph
        # The cheapest that holds a step comes first.
        self._captured = dict(sorted(self._captured.items(), key=lambda item: _cost(item[0])))
        progress("capturing CUDA graphs", 1.0)

    def find(self, shape: StepShape) -> tuple[StepShape, Captured] | None:
        """The cheapest captured step that can hold one of this shape."""
        for candidate, captured in self._captured.items():
            if candidate.holds(shape):
                return candidate, captured
        return None


def _cost(shape: StepShape) -> tuple[int, int, int]:
    return shape.tokens, shape.rows, shape.items


def shapes_of(
    rows: int, tokens: int, pages: int, page_size: int, context_length: int, tiling: Tiling
) -> list[StepShape]:
    """What is worth capturing where steps have up to so many rows and tokens, on so many pages in all.

    Attention's work is bounded by the pages there are; for decodes of many rows, which may share
    prefixes, there is a second shape with more.
    """

    def shape(count: int, each: int, chunk: int = 0, openings: int = 0, shared: int = 1) -> StepShape:
        every_row = (count + openings) * -(-context_length // page_size)
        readable = min(shared * pages + count + openings, every_row)  # with a started page each
        short, blocks = count * each, -(-each // tiling.short)
        return StepShape(
            tokens=short + chunk,
            rows=count + openings,
            outputs=short + openings,
            # Every block has a last piece, and whole ones before it.
            items=blocks * (count + readable * page_size // SPLIT_TOKENS),
            merges=short,
            long_blocks=chunk // tiling.long + openings,
            pages=readable,
            most_tokens=each,
        )

    counts = sorted({min(count, rows) for count in _ROWS})
    shapes = [shape(n, each) for each in _VERIFIED for n in counts if n * each <= _MOST_OUTPUTS]
    shapes += [shape(n, 1, shared=_SHARED) for n in counts]
    besides = [n for n in _CHUNK_ROWS if n + _OPENINGS <= rows]
    shapes += [shape(n, 1, chunk, _OPENINGS) for chunk in _CHUNKS for n in besides]
    return list(dict.fromkeys(s for s in shapes if s.tokens <= tokens))
