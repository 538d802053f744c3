"""`Report`: results.json as it grows, over calls, and the plots."""

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

FILE = "results.json"
_MAX_ERROR = 8000  # characters of one experiment's error


class Report:
    """What calls on one device found, on disk from the first result on.

    An experiment that is measured again is replaced; what it had before is kept in the file's "earlier".
    """

    def __init__(self, out: Path, machine: Mapping[str, Any], *, dry: bool) -> None:
        """Goes on with the file in `out`. One of another device, or that is none, gets another name."""
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._began = out, time.monotonic()
        self._same = {"dry": dry, "device": str(machine.get("driver", "")).partition(",")[0]}
        self.calls: list[dict[str, Any]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.call_of: dict[str, int] = {}
        self._earlier: list[Any] = []
        self._read()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.calls.append({"date": now, "machine": dict(machine)})

    @property
    def found(self) -> dict[str, list[Case]]:
        """The cases of each experiment."""
        return {name: outcome.cases for name, outcome in self.outcomes.items()}

    def keep(self, name: str, outcome: Outcome) -> None:
        """Write it down, as far as it is known. What was not started replaces nothing."""
        this = len(self.calls) - 1
        if name in self.outcomes and self.call_of[name] != this:
            if outcome.status == "not started":
                return
            self._earlier.append(self._plain(name))
        self.outcomes[name], self.call_of[name] = outcome, this
        self.calls[this]["seconds"] = time.monotonic() - self._began
        experiments = {name: self._plain(name) for name in self.outcomes}
        data = self._same | {"calls": self.calls, "experiments": experiments, "earlier": self._earlier}
        draft = self.out / f"{FILE}.part"
        draft.write_text(json.dumps(_plain(data), indent=1) + "\n")
        draft.replace(self.out / FILE)

    def plot(self) -> list[Path]:
        """The plots, or none where matplotlib is missing."""
        found = self.found
        steps = [*found.get("E3", []), *found.get("E7", [])]
        if not steps:
            return []  # nothing to show
        title = str(next(iter(found.get("device", [])), {}).get("device", "no device"))
        try:
            return plots.write(steps, found.get("E5", []), title, self.out)
        except ImportError:
            print("no plots: matplotlib is not installed (it is in the extra `bench`)")
        except Exception as error:  # the numbers are worth more than their pictures
            print(f"no plots: {type(error).__name__}: {error}")
        return []

    def _plain(self, name: str) -> dict[str, Any]:
        outcome = self.outcomes[name]
        return outcome.plain() | {
            "name": name, "call": self.call_of[name], "error": outcome.error[-_MAX_ERROR:]
        }  # fmt: skip

    def _read(self) -> None:
        path = self.out / FILE
        if not path.exists():
            return
        try:
            data = json.loads(path.read_text())
            if {key: data[key] for key in self._same} != self._same:
                raise ValueError(f"of {data['device'] or 'no GPU'}{', dry' * data['dry']}")
            calls, earlier = list(data["calls"]), list(data["earlier"])
            for name, each in data["experiments"].items():
                outcome = Outcome(**{key: each[key] for key in Outcome.__dataclass_fields__})
                if outcome.status == "running":
                    outcome.status, outcome.error = "ended", "the whole call ended meanwhile"
                self.outcomes[name], self.call_of[name] = outcome, int(each["call"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.outcomes, self.call_of = {}, {}
            number = next(n for n in range(1, 1000) if not (self.out / f"results-{n}.json").exists())
            other = path.rename(self.out / f"results-{number}.json")
            why = f"{type(error).__name__}: {error}"
            # Flushed, or the processes of experiments would print it again.
            print(f"results of other calls are in {other}, and not continued: {why}", flush=True)
            return
        self.calls, self._earlier = calls, earlier


def _plain(value: Any) -> Any:
    """Numbers with six digits, and none that JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
