"""The plot of `paceline bench --speculation`, as PNG and SVG. Needs the `bench` extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from paceline.cli.common import fail
from paceline.cli.speculation_bench import Results
from paceline.extras import installation

_COLORS = {"plain": "#555555", "n-gram": "#1b7837", "draft": "#b35806", "automatic": "#2166ac"}
_MARKERS = {"plain": "o", "n-gram": "s", "draft": "^", "automatic": "D"}
FORMATS = ("png", "svg")


def require() -> None:
    """Exit with advice if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        fail(f"--plot needs matplotlib; {installation('bench')}", 2)


def files(path: Path) -> list[Path]:
    """The files that a plot is written to, one for each format, named after `path`."""
    stem = path.with_suffix("") if path.suffix[1:] in FORMATS else path
    return [stem.with_name(f"{stem.name}.{kind}") for kind in FORMATS]


def write(results: Results, title: str, path: Path) -> list[Path]:
    """Plot tokens per second over concurrency, one line per mode; returns the files, named after `path`.

    Points are medians over the rounds, bars their minimum and maximum.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    levels = list(results)
    for name in results[levels[0]]:
        rates = [results[level][name].tokens_per_s for level in levels]
        axes.errorbar(
            levels,
            [rate.median for rate in rates],
            yerr=[
                [rate.median - rate.least for rate in rates],
                [rate.most - rate.median for rate in rates],
            ],
            label=name,
            color=_COLORS.get(name),
            marker=_MARKERS.get(name, "o"),
            markersize=5,
            linewidth=1.5,
            capsize=3,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams at once")
    axes.set_ylabel("tokens per second, all streams together")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    written = files(path)
    for file in written:
        figure.savefig(file, dpi=150)
    return written
