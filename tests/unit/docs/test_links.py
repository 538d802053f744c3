"""What a page points at exists: other pages, headings, files, tests."""

from __future__ import annotations

import re

import pytest

from tests.unit.docs.pages import NAMES, PAGES, ROOT, Page

_ROOMS = (
    "docs/",
    "tests/",
    "protos/",
    "clients/",
    "scheduler_service/",
    "executor_service/",
    ".ci/",
    "deploy/",
)
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
_TEST = re.compile(r"\btest_\w+\b(?!\.py)")


def pages(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, [Page.read(path) for path in PAGES], ids=NAMES)


@pages("page")
def test_every_link_inside_the_repository_resolves(page: Page) -> None:
    for link in page.links:
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.path.parent / target) if target else page.path
        assert path.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in Page.read(path).anchors, f"{link}: no such heading"


@pages("page")
def test_every_path_from_the_root_exists(page: Page) -> None:
    paths = [code for code in page.code if code.startswith(_ROOMS) and _PATH.fullmatch(code)]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pages("page")
def test_every_test_that_is_named_exists(page: Page) -> None:
    named = {name for code in page.code for name in _TEST.findall(code)}
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")] if named else []
    defined = set(re.findall(r"def (test_\w+)\(", "\n".join(sources)))
    assert named <= defined, named - defined
