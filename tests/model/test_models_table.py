"""The table of families on the page about models is what the loader accepts."""

from __future__ import annotations

import pytest

from tests.model.models_table import table, wrapped_table
from tests.unit.docs.pages import ROOT


@pytest.mark.long
def test_the_page_lists_what_the_loader_accepts() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    # Different? `python -m tests.model.models_table` prints the table as it should be.
    assert "\n".join(table()) in page
    assert "\n".join(wrapped_table()) in page
