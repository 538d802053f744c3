"""Nearly every step of chat traffic has a graph, which computes little more than the step needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.torch_backend.cuda.attention.attention import attention_launches
from executor_service.backends.torch_backend.cuda.attention.pipelines import AttentionDevice, Pipelines
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import max_tiles
from executor_service.backends.torch_backend.cuda.layout.rows import SHORT_TOKENS, Tiling, cut
from executor_service.backends.torch_backend.cuda.layout.step_buffer import StepBuffer, StepShape, numbers_of
from executor_service.backends.torch_backend.cuda.run import graphs
from executor_service.backends.torch_backend.cuda.run.graphs import Graphs, Rerun, pays, shapes_of
from executor_service.backends.torch_backend.ops.page_format import plain_cache
from tests.triton.traffic import CONTEXT, PAGE, StepRows, Traffic, seconds_of

TILING = Tiling.of(4, torch.bfloat16)
PROCESSORS, SLOTS = 132, 8


class _Shapes(Graphs):
    """The graphs of an 8B model's executor with adapters, of which only the shapes are made."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), TILING)
        shapes = shapes_of(256, 8192, PAGE, CONTEXT, TILING, SLOTS)
        self._captured = dict.fromkeys(sorted(shapes, key=graphs._cost), _NOTHING)

    def __len__(self) -> int:
        return len(self._captured)


_NOTHING = Rerun(lambda step: None, None)  # type: ignore[arg-type, return-value]


def shape_of(rows: StepRows) -> StepShape:
    pages = -(-(rows.starts + rows.counts) // PAGE)
    work = cut(rows.starts, rows.counts, np.cumsum(pages, dtype=np.int32) - pages, TILING)
    return StepShape(
        tokens=int(rows.counts.sum()),
        rows=len(rows.counts),
        outputs=int(rows.outputs.sum()),
        short_items=len(work["short_items"]),
        short_parts=len(work["short_bounds"]) - 1,
        long_items=len(work["long_items"]),
        long_parts=len(work["long_bounds"]) - 1,
        pages=int(pages.sum()),
    )


def adapted(shape: StepShape) -> StepShape:
    """The same step, each of whose tokens has an adapter, in as many tiles as can be."""
    tiles = max_tiles(shape.tokens, SLOTS)
    return shape._replace(adapted_tokens=shape.tokens, adapted_tiles=tiles)


def kind_of(rows: StepRows) -> str:
    short, drafting = rows.counts <= SHORT_TOKENS, bool((rows.outputs > 1).any())
    what = "verifications and decodes" if drafting else "decodes"
    if short.all():
        return what
    return f"prompts beside {what}" if short.any() else "prompts alone"


@pytest.mark.parametrize("speculation", [False, True], ids=["plain", "speculation"])
@pytest.mark.parametrize(("prompt", "count"), [(300, 10_000), (3000, 3000)], ids=["chats", "long prompts"])
def test_nearly_all_time_of_chat_traffic_is_that_of_replayed_graphs(
    speculation: bool, prompt: int, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`prompt`: tokens of a conversation's first one, median."""
    shapes = _Shapes()
    steps, replayed = Counter[str](), Counter[str]()
    tokens, padded = Counter[str](), Counter[str]()
    adapters = Counter[str]()
    all_s = replayed_s = 0.0
    for rows in Traffic(speculation, prompt=prompt).steps(count):
        kind, shape = kind_of(rows), shape_of(rows)
        steps[kind] += 1
        all_s += seconds_of(rows)
        if (found := shapes.find(shape)) is not None:
            replayed[kind] += 1
            replayed_s += seconds_of(rows)
            tokens[kind] += shape.tokens
            padded[kind] += found[0].tokens
            assert not found[0].adapted_tiles
        if (found := shapes.find(adapted(shape))) is not None:
            adapters.update(replayed=1, tokens=shape.tokens, padded=found[0].tokens)
    share, padding = replayed.total() / steps.total(), padded.total() / tokens.total()
    time_share = replayed_s / all_s
    with capsys.disabled():
        print(
            f"\n{count} steps, prompts of {prompt} tokens, speculation {'auto' if speculation else 'off'}, ",
            end="",
        )
        print(f"{len(shapes)} graphs: {time_share:.1%} of the predicted time is replayed")
        print(f"{'kind of step':42}  steps  replayed  tokens a step  padding")
        for kind, of_kind in [*steps.most_common(), ("all", count)]:
            n, whole, more = (
                counter.total() if kind == "all" else counter[kind] for counter in (replayed, tokens, padded)
            )
            print(f"{kind:42} {of_kind:6}  {n / of_kind:8.1%}  {whole / max(n, 1):13.1f}", end="")
            print(f"  {more / max(whole, 1):7.3f}")
        n, whole, more = (adapters[name] for name in ("replayed", "tokens", "padded"))
        print(f"{'all, if all rows have adapters':42} {count:6}  {n / count:8.1%}  {whole / n:13.1f}", end="")
        print(f"  {more / whole:7.3f}")
    assert len(shapes) <= 85
    assert share >= 0.95
    assert time_share >= 0.95
    assert padding <= 1.25
    assert adapters["replayed"] >= 0.95 * count
    assert adapters["padded"] <= 1.25 * adapters["tokens"]


@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 16)), min_size=1, max_size=200),
    st.lists(st.tuples(st.integers(0, 8000), st.integers(17, 400)), max_size=2),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_steps_of_up_to_512_tokens_have_a_graph_with_little_padding(
    short: Sequence[tuple[int, int]], long: Sequence[tuple[int, int]]
) -> None:
    starts, counts = np.array([*short, *long], np.int32).T
    rows = StepRows(starts, np.ascontiguousarray(counts), np.where(counts > SHORT_TOKENS, 1, counts))
    shape = shape_of(rows)
    found = _Shapes().find(shape)
    if shape.tokens <= 512 and (not long or shape.outputs <= 256):
        assert found is not None
        assert found[0].tokens <= max(1.5 * shape.tokens, shape.tokens + 8)
    if found is not None:
        assert found[0].holds(shape)
        assert pays(found[0].tokens, shape.tokens)


def test_a_graph_that_costs_more_than_launching_kernels_does_is_not_taken() -> None:
    assert pays(256, 3)  # computing 256 tokens takes as long as reading the weights
    assert pays(512, 100)
    assert not pays(768, 500)
    assert pays(640, 500)  # little padding
    assert not pays(520, 10)


@pytest.mark.parametrize("count", [1, 32, 128, 256])
def test_a_graph_does_the_work_of_its_step_and_no_more(count: int) -> None:
    """All programs of a launch run at once, and find their items in the buffer; whatever the pages are."""
    one = np.ones(count, np.int32)
    decodes = StepRows(1023 * one, one, one)
    shape = shape_of(decodes)
    found = _Shapes().find(shape)
    assert found is not None
    assert shape.short_items == 4 * count  # room for pieces of 256 keys
    buffer = torch.zeros(numbers_of(found[0]), dtype=torch.int32)
    step = StepBuffer(buffer, found[0], TILING, PROCESSORS)
    cache = plain_cache(1, PAGE, 8, 128, torch.bfloat16, torch.device("meta"))
    q = torch.empty(found[0].tokens, 32, 128, dtype=torch.bfloat16, device="meta")
    device = AttentionDevice(Pipelines.of(228 << 10), lambda _: 3)
    arrivals = torch.empty(0, dtype=torch.int32)
    rows, scale = step.attention[0], 128**-0.5
    [launch] = attention_launches(q.flatten(1), q, cache, rows, arrivals, scale, device)
    assert launch.grid[0] == min(PROCESSORS * 3, found[0].short_items * 8)
