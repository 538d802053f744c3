"""Run a random schedule that failed again: `python -m tests.replay .failures/NAME`.

Says whether it fails at the same step with the same error, and from which step on it does something else.
The exit status is 1 while it fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.failed_schedules import described, load, text_of
from tests.unit.scheduler.test_random_schedules import Run


def replay(folder: Path) -> int:
    """Run it and print what was found; the exit status."""
    schedule, failure, journal = load(folder)
    run, found = Run(schedule), None
    try:
        run.whole()
    except Exception as error:
        found = described(run.number, error)
    print(f"reported  step {failure['step']}: {failure['error']}")
    print(
        "now       it does not fail" if found is None else f"now       step {found['step']}: {found['error']}"
    )
    then, now = journal.splitlines(), text_of(run.journal).splitlines()
    first = next((i for i, pair in enumerate(zip(then, now, strict=False)) if pair[0] != pair[1]), None)
    if first is not None:
        print(f"journal   differs from entry {first + 1} on:\n  then {then[first]}\n  now  {now[first]}")
    else:
        same = min(len(then), len(now))
        print(f"journal   the same {same} entries, of {len(then)} then and {len(now)} now")
    return int(found is not None)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(replay(Path(sys.argv[1])))
