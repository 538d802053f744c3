"""`Report`: results.json as it grows, the plots, and a short table."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu import plots
from tests.gpu.bench import Case
from tests.gpu.runner import Outcome


class Report:
    """What a run found, on disk from its first result on."""

    def __init__(self, out: Path, machine: Mapping[str, Any], *, dry: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._began = out, time.monotonic()
        self.outcomes: dict[str, Outcome] = {}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._head = {"date": now, "dry": dry, "machine": dict(machine)}

    @property
    def found(self) -> dict[str, list[Case]]:
        """The cases of each experiment."""
        return {name: outcome.cases for name, outcome in self.outcomes.items()}

    def add(self, name: str, outcome: Outcome) -> None:
        """Write it down."""
        self.outcomes[name] = outcome
        experiments = {key: value.plain() for key, value in self.outcomes.items()}
        data = {**self._head, "seconds": time.monotonic() - self._began, "experiments": experiments}
        draft = self.out / ".results.json"
        draft.write_text(json.dumps(_plain(data), indent=1) + "\n")
        draft.replace(self.out / "results.json")

    def plot(self) -> list[Path]:
        """The plots, or none where matplotlib is missing."""
        found = self.found
        steps = [*found.get("E3", []), *found.get("E7", [])]
        if not steps:
            return []  # nothing to show
        title = str(found.get("device", [{}])[0].get("device", "no device"))
        try:
            return plots.write(steps, found.get("E5", []), title, self.out)
        except ImportError:
            print("no plots: matplotlib is not installed (it is in the extra `bench`)")
            return []

    def table(self) -> list[str]:
        """Steps against their floor, a line each."""
        lines = []
        for name in ("E3", "E7", "E5"):
            for case in self.found.get(name, []):
                if "step_ms" not in case:
                    continue
                size = case.get("tokens", case["rows"])
                what = f"{case['shape']:14} {case.get('kind', case.get('way')):9} {size:5}"
                depth = f" x{case['in_flight']}" if "in_flight" in case else ""
                line = (
                    f"{name} {what}{depth:9} {case['step_ms']:9.3f} ms, {case['fraction']:6.1%} of the floor"
                )
                for key in ("kernel_ms", "eager_ms", "ahead_ms", "sampled_ms"):
                    line += f"  {key} {case[key]:.3f}" if key in case else ""
                line += f"  idle {case['executor_idle']:.1%}" if "executor_idle" in case else ""
                lines.append(line)
        for case in self.found.get("E8", []):
            rate = f"{case['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in case else case["failed"][:100]
            ratio = f"  ours {case['ours_to_theirs']:.2f}x" if "ours_to_theirs" in case else ""
            lines.append(f"E8 transformers, {case['way']}, {case['rows']} rows: {rate}{ratio}")
        for case in self.found.get("E9", []):
            if "ratio" in case:
                lines.append(
                    f"E9 {case['shape']:14} decode    {case['rows']:5} {case['on_ms']:9.3f} ms with dependent"
                    f" launches, {case['ratio']:.3f} of {case['off_ms']:.3f} without"
                )
        return lines


def _plain(value: Any) -> Any:
    """Numbers with six digits, and none that JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
