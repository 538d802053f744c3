"""Structured logs on stderr, as JSON lines or for a person. Never prompts, texts or token ids.

Fields go in `extra`: `log.info("session opened", extra={"session": 7})`.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)


def configure(level: str, *, as_json: bool) -> None:
    """Send everything to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class ConsoleFormatter(logging.Formatter):
    """`10:02:11 INFO message key=value`, for a person."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and a traceback if any."""
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={json.dumps(value, default=str)}" for key, value in _fields(record).items())
        line = f"{moment} {record.levelname:7} {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
