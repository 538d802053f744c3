"""Tables on a terminal, in a pipe or in a file: a line for each row, whatever the terminal's width."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def print_aligned(console: Console, rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> None:
    """Print rows with columns as wide as their cells; columns of these indexes are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        console.print("  ".join(cells).rstrip(), markup=False, highlight=False, soft_wrap=True)


def counted(count: int, noun: str) -> str:
    """A count and what is counted, in the plural unless it is one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
