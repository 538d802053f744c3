"""`Graphs`: steps captured as CUDA graphs, one for each of some shapes, and replayed with other contents.

A CUDA graph launches the hundreds of kernels of a step at once. It repeats addresses, so everything that
changes from step to step is in one buffer, at offsets that follow from the shape; a smaller step is padded.
Which adapter is in a slot is in a table of its own, which is rewritten between steps.
Only its tokens and outputs are: attention does the work that the buffer says, whatever the shape has room
for. Steps that no captured shape holds run without a graph: those of long prompts, whose kernels take longer
than their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import max_tiles
from executor_service.backends.torch_backend.cuda.layout.rows import SHORT_TOKENS, RowCut, Tiling
from executor_service.backends.torch_backend.cuda.layout.step_buffer import (
    Picked,
    StepBuffer,
    StepShape,
    numbers_of,
)

# Tokens of captured steps. The gaps are at most half of what is below them, or 8 tokens.
_SHORT_TOKENS = (
    1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512,
)  # fmt: skip
_LONG_TOKENS = (
    24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024,
    1152, 1280, 1536, 1792, 2048,  # decodes beside a chunk or two of 1,024 tokens
)  # fmt: skip
_LONG_OUTPUTS = (64, 256)  # of steps with long rows: few of their tokens are sampled
_MANY_TOKENS = 640  # of a step whose head costs little, whatever its outputs are: it has one graph
# Of steps with adapters, which have fewer graphs and more padding.
_ADAPTED_SHORT_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_ADAPTED_LONG_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
_ADAPTED_LONG_OUTPUTS = 256
# The cost of a step, as a number of tokens. Figures are those of an 8B model in bf16 on an H100, where 256
# tokens take as long to compute as weights to read, and the launches of a step without a graph as long as 256
# tokens.
_READING, _LAUNCHING = 256, 256
_MAX_PADDING, _PADDING_TOKENS = 1.5, 8
_INTERPRETED_PROCESSORS = 2


Step = Callable[[StepBuffer], Picked]


class Captured(Protocol):
    """A captured step."""

    picked: Picked

    def replay(self) -> None:
        """Enqueue the step again; `picked` then holds the results of this run."""

    def close(self) -> None:
        """Free the graph; it isn't replayed any more."""


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
        self.replay()  # the first one brings the graph to the device

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


class Rerun:
    """Replaces `CudaGraph` where there is no GPU: computes the step on the buffer again."""

    def __init__(self, step: Step, buffer: StepBuffer) -> None:
        self._step, self._buffer = step, buffer
        self.picked = step(buffer)

    def replay(self) -> None:
        self.picked = self._step(self._buffer)

    def close(self) -> None:
        pass


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
        self.close()
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
        # `find` takes the first that holds a step: the cheapest comes first.
        self._captured = dict(sorted(self._captured.items(), key=lambda item: _cost(item[0])))
        if cuda:
            torch.cuda.synchronize(self._device)  # what is wrong with a graph is known before it is used
        progress("capturing CUDA graphs", 1.0)

    def close(self) -> None:
        """Free the graphs."""
        for captured in self._captured.values():
            captured.close()
        self._captured = {}

    def _processors(self) -> int:
        if self._device.type != "cuda":
            return _INTERPRETED_PROCESSORS
        return torch.cuda.get_device_properties(self._device).multi_processor_count

    def find(self, shape: StepShape) -> tuple[StepShape, Captured] | None:
        """The cheapest captured step that can hold one of this shape; None: no graph is cheaper."""
        for candidate, captured in self._captured.items():
            if candidate.holds(shape):
                return (candidate, captured) if pays(candidate.tokens, shape.tokens) else None
        return None


def pays(padded: int, tokens: int) -> bool:
    """Whether a graph of `padded` tokens is good for a step of fewer: it is nearly full, or cheap."""
    little = padded <= max(_MAX_PADDING * tokens, tokens + _PADDING_TOKENS)
    return little or max(padded, _READING) <= max(tokens, _READING) + _LAUNCHING


def _cost(shape: StepShape) -> tuple[int, ...]:
    return shape.tokens, shape.long_items, shape.outputs, shape.rows, shape.adapted_tiles


def shapes_of(
    rows: int, tokens: int, page_size: int, context_length: int, tiling: Tiling, slots: int = 0
) -> list[StepShape]:
    """The shapes to capture, for steps of up to `rows` rows and `tokens` tokens, and `slots` of adapters.

    A shape holds any division of its tokens among rows. Steps of short rows alone may sample all their
    tokens; where there are long ones, attention has a launch more, and fewer tokens are sampled. The length
    of attention's work costs nothing but a place in the buffer: a step that has less of it does less.

    Steps with adapters have shapes of their own, any of whose tokens may have any of the slots, so that the
    others launch no kernels of adapters.
    """

    def shape(count: int, outputs: int, *, long: bool, slots: int = 0) -> StepShape:
        """`count` tokens, of which `outputs` may be sampled."""
        # Blocks of long rows are full but for each row's last, and such a row has more tokens than a short
        # one.
        blocks = count // tiling.long.block + count // (SHORT_TOKENS + 1) if long else 0
        return StepShape(
            tokens=count,
            rows=min(count, rows),
            outputs=outputs,
            short_items=_items(count, context_length, tiling.short),
            short_parts=1,
            long_items=_items(blocks, context_length, tiling.long),
            long_parts=int(long),
            pages=min(count, rows) * -(-context_length // page_size),
            adapted_tokens=count if slots else 0,
            adapted_tiles=max_tiles(count, slots) if slots else 0,
            windows=tiling.windows,
        )

    shapes = [shape(n, n, long=False) for n in _SHORT_TOKENS]
    shapes += [
        shape(n, min(n, outputs), long=True)
        for n in _LONG_TOKENS
        for outputs in (_LONG_OUTPUTS if n < _MANY_TOKENS else _LONG_OUTPUTS[-1:])
    ]
    if slots:
        shapes += [shape(n, n, long=False, slots=slots) for n in _ADAPTED_SHORT_TOKENS]
        outputs = _ADAPTED_LONG_OUTPUTS
        shapes += [shape(n, min(n, outputs), long=True, slots=slots) for n in _ADAPTED_LONG_TOKENS]
    return list(dict.fromkeys(s for s in shapes if s.tokens <= tokens))


def _items(blocks: int, context_length: int, how: RowCut) -> int:
    """Of `blocks` blocks, each of which sees all keys that a row can have; at most one part of them."""
    return min(blocks * -(-context_length // how.split), how.part)
