"""What `overload` found: each figure beside its bound, a table and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import Line
from tests.bench.overload_client import Row

MIN_GOODPUT, MIN_GOODPUT_AT_CAPACITY = 0.90, 0.85
MAX_REFUSAL_MS = 50.0
MAX_REFUSAL_IN_HEALTH = 3.0  # times health's p99, on a model
MAX_RETRY_RATIO = 2.0


def lines_of(scenario: str, backend: str, rows: list[Row], row: Row) -> Iterator[Line]:
    """The figures of one load at one deadline; `rows` has all of that deadline."""
    best = max(other.goodput for other in rows)
    name = f"{row.load:g}x, deadline {row.deadline_s:g} s: "
    if row.load <= 1:
        share = row.goodput / row.offered if row.offered else 0.0
        yield Line(scenario, name + "goodput / offered", share, MIN_GOODPUT_AT_CAPACITY)
    else:
        yield Line(scenario, name + "goodput / best", row.goodput / best if best else 0.0, MIN_GOODPUT)
    if row.refused:
        most = MAX_REFUSAL_IN_HEALTH * row.health_p99 if backend == "model" else MAX_REFUSAL_MS
        yield Line(scenario, name + "refusals p99, ms", row.refusal_p99, most=most)
    if row.retry_ratio:
        ratio = row.retry_ratio
        yield Line(
            scenario, name + "RetryInfo / the wait, median", ratio, 1 / MAX_RETRY_RATIO, MAX_RETRY_RATIO
        )
    yield Line(scenario, name + "CPU of the client, of one core", row.client_cpu)


def all_lines(scenario: str, backend: str, rows: list[Row]) -> Iterator[Line]:
    """Of all loads and deadlines."""
    for row in rows:
        same = [other for other in rows if other.deadline_s == row.deadline_s]
        yield from lines_of(scenario, backend, same, row)


def table(backend: str, rows: list[Row], head: str) -> str:
    """In Markdown, with a verdict for each load."""
    lines = [head, ""]
    lines.append(
        "| deadline, s | load | offered /s | done in time /s | of the best | refused /s | late /s "
        "| refusals p50, p99, ms | health p99, ms | RetryInfo / wait | client, cores | bounds |"
    )
    lines.append("|" + "---|" * 12)
    for row in rows:
        same = [other for other in rows if other.deadline_s == row.deadline_s]
        best = max(other.goodput for other in same) or 1.0
        missed = [line.name.partition(": ")[2] for line in lines_of("", backend, same, row) if not line.good]
        cells = (
            f"{row.deadline_s:g}",
            f"{row.load:g}x",
            f"{row.offered:.1f}",
            f"{row.goodput:.1f}",
            f"{row.goodput / best:.2f}",
            f"{row.refused:.1f}",
            f"{row.late:.2f}",
            f"{row.refusal_p50:.1f}, {row.refusal_p99:.1f}" if row.refused else "",
            f"{row.health_p99:.1f}",
            f"{row.retry_ratio:.2f}" if row.retry_ratio else "",
            f"{row.client_cpu:.2f}",
            "held" if not missed else "missed: " + ", ".join(missed),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], capacity: float, title: str, path: Path) -> None:
    """Goodput, and the latency of refusals, by load; one line a deadline."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "paceline", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    figure, (goodput, latency) = plt.subplots(1, 2, figsize=(9, 3.6))
    for deadline_s in dict.fromkeys(row.deadline_s for row in rows):
        line = [row for row in rows if row.deadline_s == deadline_s]
        name = f"deadline {deadline_s:g} s"
        goodput.plot([row.load for row in line], [row.goodput for row in line], "o-", label=name)
        refusing = [row for row in line if row.refused]
        latency.plot([row.load for row in refusing], [row.refusal_p99 for row in refusing], "o-", label=name)
    goodput.axhline(capacity, color="gray", linestyle=":", label="capacity without deadlines")
    goodput.set_ylabel("done in time, requests/s")
    latency.set_ylabel("refusals p99, ms")
    latency.set_yscale("log")
    goodput.set_ylim(bottom=0)
    ticks = sorted({row.load for row in rows})
    for axes in (goodput, latency):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{load:g}x" for load in ticks])
        axes.minorticks_off()
        axes.set_xlabel("offered load / capacity")
        axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=100)
