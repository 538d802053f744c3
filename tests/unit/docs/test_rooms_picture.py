"""The picture of the packages is that of the folders."""

from __future__ import annotations

from tests.unit.docs.rooms_picture import PICTURE, draw


def test_the_picture_of_the_packages_is_drawn_from_todays_folders_and_their_docstrings() -> None:
    assert PICTURE.read_text() == draw(), "run: python -m tests.unit.docs.rooms_picture"
