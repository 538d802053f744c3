"""The board and the alert rules name metrics, labels and reasons that there are; the page has each alert."""

from __future__ import annotations

import re

import pytest
import yaml

from scheduler_service.core.waiting.reasons import WaitReason
from tests.support.checkout import ROOT
from tests.unit.deploy.files import DEPLOY
from tests.unit.deploy.watching import Query, alert_queries, alerts, board_queries, panels
from tests.unit.docs.metrics_table import executor_table, scheduler_table

QUESTIONS = (
    "Are users waiting, and why?",
    "Is the cache worth it?",
    "Do drafts pay?",
    "Who is loud?",
)
OF_EVERY_SERIES = {"instance", "job", "le"}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels by the name of a series."""
    found = {}
    for line in (*scheduler_table().splitlines()[2:], *executor_table().splitlines()[2:]):
        _, name, kind, names, *_ = (part.strip(" `") for part in line.split("|"))
        for series in (
            [f"{name}_{end}" for end in ("bucket", "sum", "count")] if kind == "histogram" else [name]
        ):
            found[series] = set(re.findall(r"\w+", names))
    return found


@pytest.mark.parametrize("query", [*board_queries(), *alert_queries()], ids=lambda query: query.where)
def test_a_query_reads_metrics_and_labels_that_the_services_have(
    query: Query, labels: dict[str, set[str]]
) -> None:
    assert query.selectors
    had = set(OF_EVERY_SERIES)
    for name, condition in query.selectors:
        assert name in labels, name
        had |= labels[name]
        assert set(re.findall(r"(\w+)=", condition)) <= labels[name] | OF_EVERY_SERIES, name
    grouped = ",".join(re.findall(r"\bby \(([^)]*)\)", query.text))
    assert set(re.findall(r"\w+", grouped)) <= had
    reasons = {name for names in re.findall(r'reason=~?"([^"]*)"', query.text) for name in names.split("|")}
    assert reasons <= {reason.name.lower() for reason in WaitReason}


def test_the_board_asks_its_four_questions_and_no_panel_covers_another() -> None:
    assert tuple(panel["title"] for panel in panels() if panel["type"] == "row") == QUESTIONS
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))


def test_each_alert_stands_on_the_page_and_has_a_unit_test() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    told = re.findall(r"^\| `(Paceline\w+)` \|", page, re.MULTILINE)
    assert told == [rule["alert"] for rule in alerts()]
    tests = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yaml").read_text())["tests"]
    expected = [
        (check["alertname"], bool(check["exp_alerts"])) for test in tests for check in test["alert_rule_test"]
    ]
    assert sorted(expected) == sorted((rule["alert"], fires) for rule in alerts() for fires in (False, True))
