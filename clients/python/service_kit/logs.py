"""Structured logs on stderr: an event and its fields, as text or as JSON lines. Never log prompts."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

_OURS = (
    "paceline", "paceline_fleet", "paceline_openai", "paceline_router", "service_kit", "executor_service",
    "scheduler_service",
)  # fmt: skip


class Log:
    """The logger of one module: `log.info("executor lost", address=..., detail=...)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Log details for debugging."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log a normal event."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a failure that was handled."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, error: BaseException | None = None, **fields: object) -> None:
        """Log a failure that needs attention, with the traceback of `error`."""
        self._write(logging.ERROR, event, fields, error)

    def _write(
        self, level: int, event: str, fields: Mapping[str, object], error: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            exc_info = (type(error), error, error.__traceback__) if error is not None else None
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc_info)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Formatter(logging.Formatter):
    """Formats a record as one line of JSON, or as `10:02:11 INFO    event key=value`, then any traceback."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """The line for `record`; as text, a traceback follows on further lines."""
        moment = datetime.fromtimestamp(record.created, UTC)
        fields: Mapping[str, object] = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            line = {
                "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
                **fields,
            }
            return json.dumps(line | ({"exception": trace} if trace else {}), default=str)
        words = [f"{moment.astimezone():%H:%M:%S}", f"{record.levelname:7}", record.getMessage()]
        words += [f"{key}={value}" for key, value in fields.items()]
        return _in_one_line(" ".join(words)) + (f"\n{trace}" if trace else "")


def _in_one_line(text: str) -> str:
    """The text with control characters shown: what a file or a peer says forges no line of the log, and
    gives a terminal no orders.
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def configure(format: LogFormat = "auto", level: LogLevel = "info") -> None:
    """Send this process's logs to stderr, replacing all handlers of the root logger.

    Paceline's packages log at `level` and above, other packages at WARNING and above. "auto" means console
    format if stderr is a terminal, else JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    as_json = format == "json" or (format == "auto" and not sys.stderr.isatty())
    handler.setFormatter(Formatter(as_json=as_json))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
