"""`Graphs`: steps captured as CUDA graphs, one for each of some shapes, and replayed with other contents.

A CUDA graph launches the thousand or so kernels of a step at once. It repeats addresses, so everything that
changes from step to step is in one buffer, at offsets that follow from the shape; a smaller step is padded.
Steps that no captured shape holds run without a graph: those of long prompts, whose kernels take longer than
their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.cuda.rows import Cut, Tiling
from executor_service.backends.torch_backend.cuda.step_buffer import StepBuffer, StepShape, numbers_of

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROW_TOKENS = (1, 4, 9)  # of a decode, and of verifications of up to 3 and 8 drafts
_MAX_OUTPUTS = 512  # of a captured step of verifications: logits take most of its memory
_PROMPT_TOKENS, _DECODES = (64, 128, 256, 384, 512), (8, 32, 128)  # of steps with prompts
_MAX_PROMPTS = 8  # among which such a step's prompt tokens are divided
_INTERPRETED_PROCESSORS = 2


@dataclass(frozen=True, slots=True)
class Picked:
    """The results of a step on the device."""

    hidden: torch.Tensor  # [outputs, hidden], after the final norm
    picks: torch.Tensor  # int32 [2, outputs]: the token of each output, and whether its logits were finite


Step = Callable[[StepBuffer], Picked]


class Captured(Protocol):
    """A captured step."""

    picked: Picked

    def replay(self) -> None:
        """Enqueue the step again; `picked` then holds the results of this run."""


class CudaGraph:
    """A step as a CUDA graph. Graphs of one stream and pool share memory: each overwrites others' results."""

    def __init__(self, step: Step, buffer: StepBuffer, stream: torch.cuda.Stream, pool: Any) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(buffer)  # compiles kernels, and lets libraries allocate
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may allocate and copy meanwhile, which is no part of the step.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.picked = step(buffer)

    def replay(self) -> None:
        self._graph.replay()


class Rerun:
    """Replaces `CudaGraph` where there is no GPU: computes the step on the buffer again."""

    def __init__(self, step: Step, buffer: StepBuffer) -> None:
        self._step, self._buffer = step, buffer
        self.picked = step(buffer)

    def replay(self) -> None:
        self.picked = self._step(self._buffer)


class Graphs:
    """Captured steps by shape, and the buffer that they all read."""

    def __init__(self, device: torch.device, tiling: Tiling) -> None:
        self._device, self._tiling = device, tiling
        self._captured: dict[StepShape, Captured] = {}
        self.buffer = torch.zeros(0, dtype=torch.int32, device=device)

    def capture(self, step: Step, shapes: Sequence[StepShape], progress: Progress) -> None:
        """Capture the step for each shape, the largest first, so that the others fit into its memory.

        Forgets what was captured before, whose graphs read the buffer that is freed here.
        """
        self._captured = {}
        self.buffer = torch.zeros(max(map(numbers_of, shapes)), dtype=torch.int32, device=self._device)
        cuda = self._device.type == "cuda"
        # One stream for all: the allocator reuses memory only on the stream that it was allocated on.
        stream = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle() if cuda else None
        for done, shape in enumerate(sorted(shapes, key=_cost, reverse=True)):
            progress("capturing CUDA graphs", done / len(shapes))
            # The buffer is all zeros: a step of padding alone, which has no work for attention.
            numbers = StepBuffer(self.buffer, shape, self._tiling, self._processors())
            graph = CudaGraph(step, numbers, stream, pool) if stream is not None else Rerun(step, numbers)
            self._captured[shape] = graph
            graph.replay()  # the first one brings the graph to the device
        # `find` takes the first that holds a step: the cheapest comes first.
        self._captured = dict(sorted(self._captured.items(), key=lambda item: _cost(item[0])))
        if cuda:
            torch.cuda.synchronize(self._device)  # what is wrong with a graph is known before it is used
        progress("capturing CUDA graphs", 1.0)

    def _processors(self) -> int:
        if self._device.type != "cuda":
            return _INTERPRETED_PROCESSORS
        return torch.cuda.get_device_properties(self._device).multi_processor_count

    def find(self, shape: StepShape) -> tuple[StepShape, Captured] | None:
        """The cheapest captured step that can hold one of this shape."""
        for candidate, captured in self._captured.items():
            if candidate.holds(shape):
                return candidate, captured
        return None


def _cost(shape: StepShape) -> tuple[int, int, int]:
    return shape.tokens, shape.rows, shape.short_items


def shapes_of(rows: int, tokens: int, page_size: int, context_length: int, tiling: Tiling) -> list[StepShape]:
    """The shapes to capture, for steps of up to `rows` rows and `tokens` tokens.

    The length of attention's work costs nothing but a place in the buffer: a step that has less of it does less.
    """

    def items(count: int, how: Cut) -> int:
        """Of so many blocks, each of which sees all keys that a row can have; at most one part of them."""
        return min(count * -(-context_length // how.split), how.part)

    def shape(count: int, each: int, prompt: int = 0, prompts: int = 0) -> StepShape:
        """`count` rows of `each` tokens, and up to `prompts` rows that have `prompt` tokens together."""
        short = count * each
        long_items = items(prompt // tiling.long.block + prompts, tiling.long) if prompt else 0
        return StepShape(
            tokens=short + prompt,
            rows=count + prompts,
            outputs=short + prompts,
            short_items=items(count * -(-each // tiling.short.block), tiling.short),
            short_parts=1,
            long_items=long_items,
            long_parts=1 if long_items else 0,
            pages=(count + prompts) * -(-context_length // page_size),
        )

    counts = sorted({min(count, rows) for count in _ROWS})
    shapes = [shape(n, each) for each in _ROW_TOKENS for n in counts if n * each <= _MAX_OUTPUTS]
    decodes = [n for n in _DECODES if n + _MAX_PROMPTS <= rows]
    shapes += [shape(n, 1, prompt, _MAX_PROMPTS) for prompt in _PROMPT_TOKENS for n in decodes]
    return list(dict.fromkeys(s for s in shapes if s.tokens <= tokens))
