"""The table of verdicts on the operations page is what `paceline doctor` says."""

from __future__ import annotations

from paceline.cli.diagnosis import ADVICE, Verdict

from tests.unit.docs.pages import ROOT


def test_the_page_lists_every_verdict_with_its_advice() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    _, _, table = page.partition("| verdict | for example | advice |\n")
    rows = [line.strip("|").split("|") for line in table.partition("\n\n")[0].splitlines()[1:]]
    listed = [(verdict.strip(), advice.strip()) for verdict, _example, advice in rows]
    assert listed == [(verdict.value, ADVICE[verdict]) for verdict in Verdict]
