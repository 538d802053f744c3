"""`LiveConfig`: how the services of a LiveService are started."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ScriptLine = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """Settings of an executor without a model, and of the scheduler in front of it.

    `script` tells the executor what to say: a file of JSON lines, or its lines as mappings, each with `text`
    and one of `message`, `prompt` and `pattern` (docs/testing.md). None: the oracle, whose output is a hash
    of the prompt. `executor` and `scheduler` are further settings of the services, by their names:
    `{"step_ms": 20, "max_rows": 8}`. `token`: what the service's clients send, for a scheduler with
    `tokens_file`. `start_timeout_s`: seconds in which they must serve.
    """

    script: Path | str | Sequence[ScriptLine] | None = None
    executor: Mapping[str, object] = field(default_factory=dict)
    scheduler: Mapping[str, object] = field(default_factory=dict)
    token: str = ""
    start_timeout_s: float = 60.0

    def executor_flags(self, directory: Path) -> list[str]:
        """The executor's flags. Lines of a script are written to a file in `directory`."""
        if self.script is None:
            return ["--backend=oracle", *flags(self.executor)]
        if isinstance(self.script, Path | str):
            path = Path(self.script).absolute()
        else:
            path = directory / "script.jsonl"
            path.write_text("".join(f"{json.dumps(dict(line))}\n" for line in self.script), "utf-8")
        return ["--backend=script", f"--script={path}", *flags(self.executor)]

    def scheduler_flags(self) -> list[str]:
        """The scheduler's flags."""
        return flags(self.scheduler)


def flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as flags of a service: `step_ms=20` as --step-ms=20, and a switch as --NAME or --no-NAME."""
    given = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{'' if value else 'no-'}{flag}")
        else:
            given.append(f"--{flag}={value}")
    return given
