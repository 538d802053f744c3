"""The machine's clock may be set at any time, and no deadline, lease, timeout or cache notices."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("clients/python", "executor_service", "scheduler_service")
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
_GENERATION = (
    "a start's generation: if the clock was set back, the last start's entry stays until its time is over"
)
READ = {
    "clients/python/paceline/cli/json_lines.py": "a line's time",
    "clients/python/paceline/cli/timeline.py": "the end of a picture",
    "clients/python/paceline_openai/calls.py": "an answer's `created`",
    "clients/python/paceline_router/answers.py": _GENERATION,
    "executor_service/rpc/spans.py": "a span's begin and end",
    "executor_service/runtime/runtime.py": "when the model was loaded",
    "scheduler_service/metrics/metrics.py": "the time of a gauge under vLLM's name",
    "scheduler_service/rpc/step_calls.py": "when steps began",
    "scheduler_service/service.py": _GENERATION,
    "scheduler_service/spans.py": "a span's begin and end",
    "scheduler_service/text/worker/chat_template.py": "a template's `strftime_now`",
    "scheduler_service/text/worker/encoder.py": "a template's `strftime_now`",
}
"""Modules that read the time of day, and what for: to show it, but for generations."""


def readings(tree: ast.AST) -> list[str]:
    """Where a module reads the time of day."""
    found = [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL
    ]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "time"]
    return found + [alias.name for node in imports for alias in node.names if ("time", alias.name) in WALL]


def test_the_time_of_day_is_shown_and_measures_nothing() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if readings(ast.parse(path.read_text()))
    }
    assert found == set(READ)
