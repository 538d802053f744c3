"""What a call prints at its end: figures beside their floors, then what was measured and what was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.gpu.bench import Case
from tests.gpu.runner import Outcome

_WORDS = {"done": "measured", "ended": "ended early"}
_WIDTH = 400  # characters of a reason


def figures(found: Mapping[str, Sequence[Case]]) -> list[str]:
    """Steps against their floor, and the comparisons with other ways, a line each."""
    by = "E0's ceilings" if found.get("E0") else "those of one H100: E0 was not measured"
    lines = [f"floors are by {by}"]
    for name in ("E3", "E7", "E5"):
        for case in found.get(name, []):
            if "step_ms" not in case:
                continue
            size = case.get("tokens", case["rows"])
            what = f"{case['shape']:14} {case.get('kind', case.get('way')):9} {size:5}"
            depth = f" x{case['in_flight']}" if "in_flight" in case else ""
            line = f"{name} {what}{depth:9} {case['step_ms']:9.3f} ms, {case['fraction']:6.1%} of the floor"
            for key in ("kernel_ms", "graph_ms", "eager_ms", "ahead_ms", "sampled_ms"):
                line += f"  {key} {case[key]:.3f}" if key in case else ""
            line += f"  idle {case['executor_idle']:.1%}" if "executor_idle" in case else ""
            lines.append(line)
    for case in found.get("E8", []):
        rate = f"{case['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in case else case["failed"][:100]
        ratio = f"  ours {case['ours_to_theirs']:.2f}x" if "ours_to_theirs" in case else ""
        lines.append(f"E8 transformers, {case['way']}, {case['rows']} rows: {rate}{ratio}")
    for case in found.get("E9", []):
        if "ratio" in case:
            lines.append(
                f"E9 {case['shape']:14} decode    {case['rows']:5} {case['on_ms']:9.3f} ms with dependent"
                f" launches, {case['ratio']:.3f} of {case['off_ms']:.3f} without"
            )
    return lines


def line_of(name: str, outcome: Outcome) -> str:
    """One experiment: what came of it, how much, and why not more."""
    why = [outcome.line(), *(f"a case failed: {reason}" for reason in outcome.failures)]
    why += [f"skipped: {reason}" for reason in outcome.skipped]
    word = "partly failed" if outcome.status == "done" and not outcome.measured else outcome.status
    reasons = [each if len(each) <= _WIDTH else f"{each[:_WIDTH]}…" for each in why if each]
    counts = f"{len(outcome.cases):3} cases {outcome.seconds:6.1f} s"
    return f"{name:8} {_WORDS.get(word, word):13} {counts}  {'; '.join(reasons) or outcome.title}"


def outcomes(found: Mapping[str, Outcome]) -> list[str]:
    """A line for each experiment that was asked for; what was not measured is named last."""
    missing = [name for name, outcome in found.items() if not outcome.measured]
    lines = ["", *(line_of(name, outcome) for name, outcome in found.items())]
    if not missing:
        return [*lines, "all was measured"]
    again = ",".join(missing)
    return [*lines, f"NOT MEASURED, or not whole: {', '.join(missing)}. Once more: --only {again}"]
