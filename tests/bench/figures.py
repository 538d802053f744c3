"""One measured figure beside its bounds, as a line of text and in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One figure. `least` and `most` are its bounds, where it has them."""

    scenario: str
    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def good(self) -> bool:
        """Within its bounds."""
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )

    def __str__(self) -> str:
        bounds = [f"≥ {self.least:.2f}"] if self.least is not None else []
        bounds += [f"≤ {self.most:.2f}"] if self.most is not None else []
        verdict = "held" if self.good else "NOT HELD"
        return f"{self.scenario:15s} {self.name:52s} {self.value:9.2f}  {', '.join(bounds):18s} {verdict}"


def report(lines: Sequence[Line], file: Path | None) -> int:
    """Print the figures, and write them to `file` as JSON. Returns 0 if all are within bounds, else 1."""
    print(*lines, sep="\n")
    if file:
        told = [asdict(line) | {"good": line.good} for line in lines]
        file.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if all(line.good for line in lines) else 1
