"""The two plots of a run: the share of the floor by rows, and step time against the floor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.bench import Case

_COLORS = {
    "Qwen3-0.6B": "#1b7837",
    "Qwen3-4B": "#b35806",
    "Qwen3-8B": "#2166ac",
    "Qwen3-30B-A3B": "#762a83",
}
_FORMATS = ("png", "svg")


def write(steps: Sequence[Case], service: Sequence[Case], title: str, out: Path) -> list[Path]:
    """roofline and steps, PNG and SVG, of the cases of E3 and E7 and those of E5. Raises ImportError."""
    decodes = [case for case in steps if case["kind"] == "decode"]
    generated = [case for case in service if case["way"] == "Generate"]
    return [*_roofline(decodes, generated, title, out / "roofline"), *_steps(decodes, title, out / "steps")]


def _by_shape(cases: Iterable[Case]) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: case["rows"]):
        groups[case["shape"]].append(case)
    return groups


def _roofline(decodes: Sequence[Case], generated: Sequence[Case], title: str, stem: Path) -> list[Path]:
    figure, axes = _figure("rows in a step", "share of the floor", f"Decode steps: {title}")
    for shape, cases in _by_shape(decodes).items():
        _line(axes, cases, "fraction", shape, f"{shape}, forward", "-o")
        _line(axes, cases, "ahead_fraction", shape, f"{shape}, the next one launched ahead", ":o")
    for shape, cases in _by_shape(generated).items():
        _line(axes, cases, "fraction", shape, f"{shape}, through Generate", "--s")
    axes.axhline(0.75, color="#999999", linewidth=0.8, label="75 %")
    axes.set_ylim(0, 1.05)
    return _saved(figure, axes, stem)


def _steps(decodes: Sequence[Case], title: str, stem: Path) -> list[Path]:
    figure, axes = _figure("rows in a step", "milliseconds", f"Step time and floor: {title}")
    for shape, cases in _by_shape(decodes).items():
        _line(axes, cases, "step_ms", shape, f"{shape}, forward", "-o")
        _line(axes, cases, "kernel_ms", shape, f"{shape}, kernels alone", "--s")
        _line(axes, cases, "floor_ms", shape, f"{shape}, floor", ":")
    axes.set_yscale("log")
    return _saved(figure, axes, stem)


def _line(axes: Any, cases: Sequence[Case], key: str, shape: str, label: str, style: str) -> None:
    points = [(case["rows"], case[key]) for case in cases if key in case]
    if points:
        axes.plot(*zip(*points, strict=True), style, color=_COLORS[shape], label=label, markersize=4)


def _figure(x: str, y: str, title: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    return figure, axes


def _saved(figure: Any, axes: Any, stem: Path) -> list[Path]:
    from matplotlib.ticker import NullLocator, ScalarFormatter

    axes.set_xticks(sorted({int(x) for line in axes.get_lines() for x in line.get_xdata() if x >= 1}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    files = [stem.with_suffix(f".{kind}") for kind in _FORMATS]
    for file in files:
        figure.savefig(file, dpi=150)
    return files
