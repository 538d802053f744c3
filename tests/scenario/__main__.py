"""`python -m tests.scenario LANGUAGE...`: exits with 1 unless each step of each language is as expected."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.scenario.runner import COMMANDS, RunnerError, runner
from tests.scenario.stage import stage
from tests.scenario.steps import SCENARIO, take_again

_LANGUAGES_AT_ONCE = 3
"""They mostly wait: a client needs seconds to find that a scheduler is frozen."""


def main() -> int:
    """Run the scenario with each language; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenario", description=__doc__)
    parser.add_argument("languages", nargs="+", choices=sorted(COMMANDS))
    parser.add_argument("--show", action="store_true", help="print each step's time and outcome")
    arguments = parser.parse_args()
    failures = {}
    with ThreadPoolExecutor(_LANGUAGES_AT_ONCE) as threads:
        begun = {threads.submit(play, one, show=arguments.show): one for one in arguments.languages}
        for future in as_completed(begun):
            failures[begun[future]] = future.result()
    print(report(failures), flush=True)
    return 1 if any(failures.values()) else 0


def report(failures: Mapping[str, Sequence[str]]) -> str:
    """The last lines: all failures by language, so that the end of a log tells them."""
    failed = {language: found for language, found in failures.items() if found}
    lines = [f"{language}: {failure}" for language, found in failed.items() for failure in found]
    return "\n".join([*lines, f"{len(failures)} languages, failed: {', '.join(failed) or 'none'}"])


def play(language: str, *, show: bool = False) -> list[str]:
    """Run all steps with the runner of one language, at services of its own; what went wrong, in words.

    What the runner writes to stderr, as libraries do about each lost connection, is printed after failures.
    """
    began = time.monotonic()
    failures = []
    name = "the start"
    with tempfile.TemporaryDirectory() as folder:
        stderr = Path(folder) / "stderr"
        try:
            with stage(Path(folder)) as services, runner(language, stderr) as runs:
                for step in SCENARIO:
                    step_began, name = time.monotonic(), step["name"]
                    outcome, complaints = take_again(services, runs, step)
                    failures += [f"{name}: {complaint}" for complaint in complaints]
                    if show:
                        took_s = round(time.monotonic() - step_began, 1)
                        print(json.dumps({"language": language, "step": name, "took_s": took_s, **outcome}))
        except (RunnerError, TimeoutError) as error:
            failures.append(f"{name}: {error}")
        if failures:
            print(f"{language} wrote to stderr:\n{stderr.read_text(errors='replace')}")
    took_s = time.monotonic() - began
    print(f"{language}: {len(SCENARIO)} steps, {len(failures)} failures, {took_s:.1f} s", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
