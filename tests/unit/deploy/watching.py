"""The queries of the Grafana board and of the alert rules."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tests.unit.deploy.files import DEPLOY, documents

BOARD = DEPLOY / "grafana" / "paceline.json"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
_SELECTOR = re.compile(r"\b(paceline_\w+)(\{[^}]*\})?")


@dataclass(frozen=True, slots=True)
class Query:
    """A query, and where it stands."""

    where: str
    text: str

    @property
    def selectors(self) -> list[tuple[str, str]]:
        """Each metric that it reads, and the condition on its labels, in braces; "": none."""
        return _SELECTOR.findall(self.text)


def panels() -> list[dict[str, Any]]:
    """Of the board, rows included."""
    found: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return found


def board_queries() -> list[Query]:
    """As Grafana would send them, for all schedulers and executors."""
    return [
        Query(panel["title"], re.sub(r"\$(scheduler|executor)\b", ".*", target["expr"]))
        for panel in panels()
        for target in panel.get("targets", ())
    ]


def alerts() -> list[dict[str, Any]]:
    """All alert rules."""
    [rules] = documents(RULES)
    return [rule for group in rules["groups"] for rule in group["rules"]]


def alert_queries() -> list[Query]:
    """The conditions of the alerts."""
    return [Query(rule["alert"], rule["expr"]) for rule in alerts()]
