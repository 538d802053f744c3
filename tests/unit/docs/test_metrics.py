"""The tables of metrics on the operations page are what the registries say."""

from __future__ import annotations

import pytest

from tests.unit.docs.metrics_table import executor_table, scheduler_table
from tests.unit.docs.pages import ROOT


@pytest.mark.parametrize("table", [scheduler_table, executor_table])
def test_the_page_lists_all_metrics_of_the_registry_and_no_others(table: object) -> None:
    assert callable(table)
    page = (ROOT / "docs" / "operations.md").read_text().splitlines()
    expected = table().splitlines()
    prefix = expected[-1].split("_")[1]
    names = (f"| `paceline_{prefix}_", *(["| `gen_ai_"] if prefix == "scheduler" else []))
    listed = [line for line in page if line.startswith(names)]
    # Different? `python -m tests.unit.docs.metrics_table` prints the tables as they should be.
    assert listed == expected[2:]
