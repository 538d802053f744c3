"""`paceline bench --speculation`: compares plain decoding with each drafter.

All modes run on the same prompts, one after the other within each round, so that a change of the machine's
speed affects all of them; ratios are of figures of one round. Each mode's first round is not measured: in it
the scheduler's controller learns step times and acceptance.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from paceline import aio
from paceline.cli.load import Load, Summary, Trace, decode_rate, run_rounds, summarize
from paceline.cli.rows import Column, counted
from paceline.types import Drafter, ModelInfo, Speculation

PLAIN = "plain"


def modes(model: ModelInfo) -> dict[str, Speculation]:
    """The compared modes by name: plain, each drafter of the server, and all drafters together.

    Without that of grammars, which the prompts of the benchmark have none of.
    """
    names = {Drafter.NGRAM: "n-gram", Drafter.DRAFT_EXECUTOR: "draft"}
    single = {names[drafter]: Speculation("auto", drafter) for drafter in model.drafters if drafter in names}
    return {PLAIN: Speculation("off"), **single, "automatic": Speculation("auto")}


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, minimum and maximum over rounds."""

    median: float
    least: float  # minimum
    most: float  # maximum

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of `values`, at least one."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The figures of one mode at one concurrency."""

    tokens_per_s: Spread  # while every stream decodes; see `load.decode_rate`
    to_plain: Spread  # ratio to plain decoding's rate in the same round
    drafted_tokens: int
    accepted_tokens: int
    verifications: int
    tokens_per_verification: float | None  # None: no verifications
    summary: Summary


Results = dict[int, dict[str, ModeResult]]
"""Results by concurrency, then by mode."""


async def compare(
    client: aio.Client,
    model: ModelInfo,
    load: Load,
    levels: Sequence[int],
    rounds: int,
    timeout_s: float | None,
    progress: Callable[[str, int], None],
) -> AsyncIterator[tuple[int, dict[str, ModeResult]]]:
    """Measure all modes at all concurrencies; gives each concurrency's results when they are measured.

    `progress` is called with (level and mode, new tokens).
    """
    chosen = modes(model)
    number = 0
    for level in levels:
        measured: dict[str, list[list[Trace]]] = {name: [] for name in chosen}
        for turn in range(-1, rounds):
            for name, speculation in chosen.items():
                hear = partial(progress, f"{counted(level, 'stream')}, {name}")
                hear(0)
                traces = await run_rounds(
                    client,
                    model,
                    # A salt for each mode: no mode finds the prompts in the prefix cache.
                    dataclasses.replace(load, salt=f"{load.salt}/{name}"),
                    concurrency=level,
                    rounds=1,
                    together=True,
                    timeout_s=timeout_s,
                    on_tokens=hear,
                    first_number=number,
                    speculation=speculation,
                )
                if turn >= 0:
                    measured[name] += traces
            number += level
        yield level, {name: result_of(measured[name], measured[PLAIN]) for name in chosen}


def result_of(rounds: list[list[Trace]], plain: list[list[Trace]]) -> ModeResult:
    """The figures of one mode's rounds, with ratios to plain decoding in the same rounds."""
    rates = [_rate(traces) for traces in rounds]
    ends = [trace.finished.usage for traces in rounds for trace in traces if trace.finished]
    accepted = sum(usage.accepted_tokens for usage in ends)
    verifications = sum(usage.verifications for usage in ends)
    return ModeResult(
        tokens_per_s=Spread.of(rates),
        to_plain=Spread.of([rate / _rate(other) for rate, other in zip(rates, plain, strict=True)]),
        drafted_tokens=sum(usage.drafted_tokens for usage in ends),
        accepted_tokens=accepted,
        verifications=verifications,
        tokens_per_verification=1 + accepted / verifications if verifications else None,
        summary=summarize(rounds),
    )


def _rate(traces: list[Trace]) -> float:
    """Tokens per second of one round: its decode rate, or its overall rate if it was too short for one."""
    return decode_rate(traces) or summarize([traces]).tokens_per_s


CAPTION = (
    "tok/s while every stream decodes, median of the rounds; to plain: ratio and its spread;"
    " per check: tokens that a verification gave"
)
COLUMNS = (
    Column("streams", 7),
    Column("mode", 9, left=True),
    Column("tok/s", 8),
    Column("to plain", 16),
    Column("accepted", 14),
    Column("per check", 9),
)


def cells(level: int, by_mode: dict[str, ModeResult]) -> Iterator[tuple[str, ...]]:
    """The figures of one concurrency, a row for each mode, as COLUMNS has them."""
    for name, result in by_mode.items():
        ratio, drafted = result.to_plain, result.drafted_tokens
        each = result.tokens_per_verification
        yield (
            f"{level}" if name == PLAIN else "",
            name,
            f"{result.tokens_per_s.median:.1f}",
            "" if name == PLAIN else f"{ratio.median:.2f} ({ratio.least:.2f}-{ratio.most:.2f})",
            f"{result.accepted_tokens / drafted:.0%} of {drafted}" if drafted else "-",
            "-" if each is None else f"{each:.2f}",
        )
