"""`paceline bench --speculation`: plain decoding beside each way of guessing ahead.

All modes answer the same prompts, in turn within each round, so that a machine that slows down slows
all of them: ratios are of one round's figures. A mode's first round is not measured, for the
scheduler's controller learns from it what steps cost and how many guesses are right.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.table import Table

from paceline import aio
from paceline.cli.load import Load, Summary, Trace, decode_rate, run_rounds, summarize
from paceline.types import Drafter, ModelInfo, Speculation

PLAIN = "plain"


def modes(model: ModelInfo) -> dict[str, Speculation]:
    """What is compared: plain, each drafter that the server has, and all of them together."""
    names = {Drafter.NGRAM: "n-gram", Drafter.DRAFT_EXECUTOR: "draft"}
    single = {names[drafter]: Speculation("auto", drafter) for drafter in model.drafters}
    return {PLAIN: Speculation("off"), **single, "automatic": Speculation("auto")}


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and their least and most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode at one concurrency."""

    tokens_per_s: Spread  # while every stream decodes; see `load.decode_rate`
    to_plain: Spread  # the same, divided by plain decoding's of the same round
    drafted_tokens: int
    accepted_tokens: int
    verifications: int
    tokens_per_verification: float | None  # None: there was none
    summary: Summary


Results = dict[int, dict[str, ModeResult]]
"""By concurrency, then by mode."""


async def compare(
    client: aio.Client,
    model: ModelInfo,
    load: Load,
    levels: Sequence[int],
    rounds: int,
    timeout_s: float | None,
    progress: Callable[[str, int], None],
) -> Results:
    """Measure all modes at all levels; `progress` hears of each mode's turn and of its tokens."""
    results: Results = {}
    chosen = modes(model)
    number = 0
    for level in levels:
        measured: dict[str, list[list[Trace]]] = {name: [] for name in chosen}
        for turn in range(-1, rounds):
            for name, speculation in chosen.items():
                hear = partial(progress, f"{level} streams, {name}")
                hear(0)
                traces = await run_rounds(
                    client,
                    model,
                    # Every mode meets the prompts anew: the prefix cache must not tell who came first.
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
        results[level] = {name: result_of(measured[name], measured[PLAIN]) for name in chosen}
    return results


def result_of(rounds: list[list[Trace]], plain: list[list[Trace]]) -> ModeResult:
    """The figures of one mode, beside plain decoding's of the same rounds."""
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
    """Tokens per second of one round: its decode rate, or if it was too short for one its whole rate."""
    return decode_rate(traces) or summarize([traces]).tokens_per_s


def table(results: Results) -> Table:
    """The figures, a line per level and mode."""
    table = Table(
        caption="tok/s while every stream decodes, median of the rounds; to plain: ratio and its spread;"
        " per check: tokens that a verification gave"
    )
    for column in ("streams", "mode", "tok/s", "to plain", "accepted", "per check"):
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for level, by_mode in results.items():
        for name, result in by_mode.items():
            ratio, drafted = result.to_plain, result.drafted_tokens
            each = result.tokens_per_verification
            table.add_row(
                f"{level}" if name == PLAIN else "",
                name,
                f"{result.tokens_per_s.median:.1f}",
                "" if name == PLAIN else f"{ratio.median:.2f} ({ratio.least:.2f}-{ratio.most:.2f})",
                f"{result.accepted_tokens / drafted:.0%} of {drafted}" if drafted else "-",
                "-" if each is None else f"{each:.2f}",
            )
        table.add_section()
    return table
