"""A table whose rows are printed as they are made, on a terminal, into a pipe or into a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, its width in characters, and whether its cells stand on the left of it.

    A cell that is wider than its column is printed whole.
    """

    title: str
    width: int
    left: bool = False

    def cell(self, text: str) -> str:
        """The text in the column's width."""
        return text.ljust(self.width) if self.left else text.rjust(self.width)


class Rows:
    """Prints `caption` and the titles of the columns before the first row, and each row when it is added."""

    def __init__(self, console: Console, caption: str, columns: Sequence[Column]) -> None:
        self._console, self._columns, self._caption = console, columns, caption
        self._begun = False

    def add(self, *cells: str) -> None:
        """Print a row: one cell for each column."""
        if not self._begun:
            self._begun = True
            self._print(self._caption, "dim")
            self._print(self._line([column.title for column in self._columns]), "bold")
        self._print(self._line(cells))

    def _line(self, cells: Sequence[str]) -> str:
        placed = [column.cell(cell) for column, cell in zip(self._columns, cells, strict=True)]
        return "  ".join(placed).rstrip()

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
