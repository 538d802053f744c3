"""How the errands of a soak ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from paceline import errors

from tests.bench.soak.errands import DEADLINE_MARGIN_S
from tests.bench.soak.reference import WrongAnswer

MAX_ERRAND_S = 240.0
"""A call without a deadline that takes longer counts as hung. Several faults may strike it in a row, and
each costs some seconds to notice and a restart of up to 12 s."""
MAX_TOLD = 20  # bad ends that are printed in full


class Tally:
    """Counts by errand and outcome. Wrong and hung ones, and streams that failed, are told at once."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self.counts: Counter[tuple[str, str]] = Counter()
        self.wrong = self.hung = self.failed = 0
        self.longest_s: dict[str, float] = {}
        self.live: dict[object, tuple[str, float]] = {}

    async def run(self, name: str, errand: Callable[[], Awaitable[str]]) -> bool:
        """One errand, whatever it ends with; False if it was refused."""
        began, key, taken = time.monotonic(), object(), True
        self.live[key] = name, began
        try:
            async with asyncio.timeout(MAX_ERRAND_S):
                outcome = await errand()
        except WrongAnswer as error:
            self.wrong += 1
            outcome = self._bad(name, "WRONG", began, error)
        except TimeoutError:
            self.hung += 1
            outcome = self._bad(name, "HUNG", began, f"no end, {DEADLINE_MARGIN_S:g} s beyond its deadline")
        except errors.RetryLater as error:  # refused: nothing was received
            outcome, taken = f"{type(error).__name__} {error.reason}".strip(), False
        except errors.PacelineError as error:
            self.failed += 1
            outcome = self._bad(name, "FAILED", began, f"{type(error).__name__} {error.reason}: {error}")
        finally:
            del self.live[key]
        self.counts[name, outcome] += 1
        self.longest_s[name] = max(self.longest_s.get(name, 0.0), time.monotonic() - began)
        return taken

    def _bad(self, name: str, how: str, began: float, what: object) -> str:
        if self.wrong + self.hung + self.failed <= MAX_TOLD:
            self._log(f"{how}: {name} after {time.monotonic() - began:.1f} s: {str(what)[:2000]}")
        return how

    def table(self) -> str:
        """A line for each errand."""
        lines = []
        for name in sorted(self.longest_s):
            ends = {outcome: count for (one, outcome), count in sorted(self.counts.items()) if one == name}
            told = ", ".join(f"{count} {outcome}" for outcome, count in ends.items())
            lines.append(f"{name:15s} {sum(ends.values()):6d}  longest {self.longest_s[name]:6.1f} s  {told}")
        return "\n".join(lines)
