"""Draws random schedules: requests, when they arrive, what happens to them, and how big everything is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from executor_service.backends.base import Backend
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.evaluation import Evaluation, EvaluationInput, HiddenPooling
from scheduler_service.core.request import DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.step import Capacity
from tests.unit.scheduler.engine_executor import (
    ADAPTERS,
    LATE,
    LOOPS,
    TURNS,
    VOCABULARY,
    late_oracle,
    late_paged_attention,
    oracle,
    paged_attention,
)

CONTEXT = 48

_prefixes = st.sampled_from([(), (), tuple(range(1, 9)), tuple(range(1, 13)), tuple(range(20, 26))])
_tails = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6).map(tuple)
_ids = st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1)
_adapters = st.sampled_from([b"", b"", *ADAPTERS[:-1]])


FEW = tuple((token, 50.0) for token in range(3))  # repeats itself soon, so that n-grams match

KINDS = (
    *("cancel", "stop", "lose", "lose after computing", "idle"),
    *("squeeze", "squeeze", "squeeze slots", "squeeze slots"),
)
DRAFT_KINDS = ("lose draft", "lose draft after computing", "draft returns", "draft returns", "squeeze draft")

BACKENDS: dict[str, tuple[Callable[[int], Backend], Callable[[int], Backend]]] = {
    "oracle": (oracle, functools.partial(oracle, agreement=0.8)),
    "paged-attention": (paged_attention, functools.partial(paged_attention, head_dim=10)),
}
"""The target, and a draft that often agrees with it."""
LATE_BACKENDS: dict[str, Callable[[int], Backend]] = {
    "oracle": late_oracle,
    "paged-attention": late_paged_attention,
}
"""The same targets as devices, two steps at a time, that compute nothing before their answers are read."""


@dataclass(frozen=True)
class Happening:
    """One thing that befalls request `who` (or the executor), while a step is in flight or between steps."""

    kind: str  # of KINDS or DRAFT_KINDS
    who: int
    step: int
    in_flight: bool


@dataclass(frozen=True)
class Schedule:
    """Requests with the step at which each arrives, what happens, and how big everything is."""

    requests: tuple[Request, ...]
    arrivals: tuple[int, ...]
    happenings: tuple[Happening, ...]
    capacity: Capacity
    config: CoreConfig
    backend: str = "oracle"
    late: bool = False  # the target is one of LATE_BACKENDS
    draft: Capacity | None = None  # no draft executor
    draft_ticks: tuple[int, ...] = (0,)  # how long each draft step takes, in turn
    token_s: float | None = None  # for a grammar to read a token of an output
    begun: tuple[tuple[float, ...], ...] = ()
    """Of each request, the share of each completion that was produced elsewhere; above 1: with its end."""


_speculations = st.builds(
    DraftingWish,
    st.sampled_from(
        [
            frozenset(),
            *(frozenset({d}) for d in DraftSource),
            frozenset({DraftSource.EXECUTOR}),  # often beaten by the others where all may draft
            frozenset(DraftSource),
            frozenset(DraftSource),
        ]
    ),
    st.sampled_from([None, None, *range(1, 9)]),
)


@st.composite
def evaluations(draw: st.DrawFn, number: int) -> Request:
    """One request that scores its inputs, or asks for a vector of each."""
    pooling = draw(st.sampled_from([None, None, *HiddenPooling]))
    shared = draw(st.sampled_from([(), (), tuple(range(1, 34))]))  # long enough to be waited for
    inputs = []
    for _ in range(draw(st.sampled_from([1, 2, 5]))):
        tokens = (shared + draw(_prefixes) + draw(_tails) + draw(_tails))[:CONTEXT]
        scored_from = 0 if pooling else draw(st.integers(1, len(tokens) - 1))
        inputs.append(EvaluationInput(tokens, scored_from))
    return Request(
        id=f"r{number}",
        prompt=(),
        sampling=SamplingSettings(),
        n=len(inputs),
        priority=draw(st.integers(0, 2)),
        deadline=draw(st.none() | st.none() | st.floats(0.05, 2.0)),
        salt=draw(st.sampled_from([b"", b"", b"salt"])),
        adapter=draw(_adapters),
        identity=draw(st.sampled_from(["", "", "a", "b"])),
        weight=draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
        prompt_logprobs=None if pooling else draw(st.sampled_from([0, 2])),
        evaluation=Evaluation(tuple(inputs), pooling),
    )


@st.composite
def requests(draw: st.DrawFn, number: int, speculation: st.SearchStrategy[DraftingWish]) -> Request:
    """One request; few prompts, so that prefixes are shared."""
    if not draw(st.integers(0, 3)):
        return draw(evaluations(number))
    max_tokens = draw(st.none() | st.integers(1, 24))
    return Request(
        id=f"r{number}",
        prompt=draw(_prefixes) + draw(_tails),
        sampling=SamplingSettings(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            top_k=draw(st.sampled_from([0, 5])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
            presence_penalty=draw(st.sampled_from([0.0, 0.5])),
            seed=draw(st.integers(0, 3)),
            logprobs=draw(st.sampled_from([None, None, 2])),
            logit_bias=draw(st.sampled_from([(), (), FEW])),
            grammar=draw(st.sampled_from([None, None, LOOPS, TURNS, LATE])),
        ),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(4, max_tokens or 4))),
        eos_token_ids=draw(_ids),
        stop_token_ids=draw(_ids),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        priority=draw(st.integers(0, 2)),
        deadline=draw(st.none() | st.none() | st.floats(0.05, 2.0)),
        salt=draw(st.sampled_from([b"", b"", b"salt"])),
        adapter=draw(_adapters),
        speculation=draw(speculation),
        identity=draw(st.sampled_from(["", "", "a", "b"])),
        weight=draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 3])),
    )


_begun = st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0, 2.0]), min_size=3, max_size=3).map(tuple)


_draft_capacities = st.none() | st.builds(
    Capacity,
    total_pages=st.sampled_from([3, 16, 64, 256]),
    page_size=st.sampled_from([1, 2, 4]),
    context_length=st.sampled_from([8, CONTEXT, CONTEXT]),
    max_sequences=st.sampled_from([2, 9]),
    max_rows=st.sampled_from([1, 8]),
    max_step_tokens=st.sampled_from([4, 64]),
    max_steps=st.sampled_from([2, 8, 64]),
)


def needed(request: Request) -> int:
    """Tokens that it must have room for."""
    if request.evaluation is not None:
        return request.evaluation.longest
    return len(request.prompt) + (request.max_tokens or 1)


@st.composite
def schedules(
    draw: st.DrawFn,
    backend: str = "oracle",
    *,
    speculate: bool = False,
    late: bool = False,
    depths: tuple[int, ...] = (0, 0, 1, 1, 2, 2, 3),
) -> Schedule:
    """A pool that holds the largest request and hardly more; `depths`: steps in flight; 0: one, and one
    more while steps are short."""
    count = draw(st.integers(2, 8))
    speculation = _speculations if speculate else st.just(DraftingWish())
    wanted = tuple(draw(requests(number, speculation)) for number in range(count))
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    largest = max(map(needed, wanted))
    capacity = Capacity(
        total_pages=-(-largest // page_size) * draw(st.sampled_from([4, 5, 6])) // 4,
        page_size=page_size,
        context_length=CONTEXT,
        max_sequences=draw(st.sampled_from([2, 5, 9])),  # one is for the squeeze
        max_rows=draw(st.sampled_from([1, 3, 8])),
        max_step_tokens=draw(st.sampled_from([8, 16, 64])),
        max_drafts=draw(st.sampled_from([2, 8, 64])),
        short_step_s=1.0,
        max_adapter_slots=draw(st.sampled_from([1, 1, 2, 3])),
        max_output_bytes=draw(st.sampled_from([192, 400, 1 << 20])),
        hidden_size=BACKENDS[backend][0](CONTEXT).info.hidden_size,
    )
    config = CoreConfig(
        max_step_tokens=draw(st.sampled_from([2, 8, 32])),
        prefill_chunk_tokens=draw(st.sampled_from([2, 3, 7, 32])),
        max_running=draw(st.sampled_from([1, 3, 8])),
        failover_timeout_s=1e6,
        max_in_flight=draw(st.sampled_from(depths)),
    )
    kinds = KINDS + DRAFT_KINDS if speculate else KINDS
    happening = st.builds(
        Happening, st.sampled_from(kinds), st.integers(0, count - 1), st.integers(0, 60), st.booleans()
    )
    return Schedule(
        requests=wanted,
        arrivals=tuple(draw(st.sampled_from([0, 0, 1, 3, 9])) for _ in range(count)),
        happenings=tuple(draw(st.lists(happening, max_size=8))),
        capacity=capacity,
        config=config,
        backend=backend,
        late=late,
        draft=draw(_draft_capacities) if speculate else None,
        draft_ticks=draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 8]), min_size=1, max_size=4).map(tuple)),
        token_s=draw(st.sampled_from([None, 0.001])),
        begun=tuple(draw(st.just(()) | st.just(()) | _begun) for _ in range(count)),
    )
