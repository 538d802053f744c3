"""docs/openai.md says of each field and bound what the code does."""

from __future__ import annotations

from dataclasses import fields

from paceline_openai.routes import ALIASES, ENDPOINTS
from paceline_openai.settings import Bounds

from tests.support.checkout import ROOT

PAGE = (ROOT / "docs" / "openai.md").read_text()


def test_the_page_has_the_fields_of_each_endpoint_as_the_code_has_them() -> None:
    sections = {part.partition("\n")[0]: part for part in PAGE.split("\n### ")[1:]}
    tables = {f"`POST {one.path}`": one.table for one in ENDPOINTS if one.table is not None}
    assert list(sections) == list(tables)
    for title, table in tables.items():
        rows = [line for line in sections[title].split("\n") if line.startswith("| `")]
        assert rows == [f"| `{one.name}` | {one.state} | {one.note} |" for one in table.fields.values()]


def test_the_page_names_each_other_path() -> None:
    assert {path for path in ALIASES if f"`{path}`" not in PAGE} == set()


def test_the_page_names_each_bound() -> None:
    assert {one.name for one in fields(Bounds) if f"`{one.name}`" not in PAGE} == set()
