"""`python -m tests.unit.docs.rooms_picture`: draws `docs/pictures/rooms.svg`.

The boxes are the packages of both services with the first sentence of their docstrings, floor by floor as the
layers of the import contracts in pyproject.toml have them.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from html import escape

from tests.unit.docs.pages import ROOT

PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
SERVICES = {"scheduler_service": ("#eef3fb", "#3a62a8"), "executor_service": ("#f1f8ee", "#4c8a3a")}
_WIDTH, _GAP, _MARGIN, _LINE, _ARROW = 420, 20, 24, 15, 16  # px
_CHARACTER = 6.1  # px, of the small font on average

Floors = list[list[str]]


def floors(service: str) -> Floors:
    """The service's packages, highest floor first. Raises AssertionError if one is not on one floor."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [
        contract["layers"]
        for contract in contracts
        if contract["type"] == "layers" and contract.get("containers") == [service]
    ]
    packages = {path.parent.name for path in (ROOT / service).glob("*/__init__.py")}
    names = [[name.strip() for name in layer.split("|")] for layer in layers]
    found = [floor for layer in names if (floor := [name for name in layer if name in packages])]
    placed = [name for floor in found for name in floor]
    assert sorted(placed) == sorted(packages), f"{service}: packages without a floor, or with several"
    return found


def draw() -> str:
    """The picture."""
    columns = [
        _column(service, floors(service), _MARGIN + i * (_WIDTH + 2 * _GAP), *colours)
        for i, (service, colours) in enumerate(SERVICES.items())
    ]
    height = max(bottom for _, bottom in columns) + 40
    width = 2 * _MARGIN + 2 * _WIDTH + 2 * _GAP
    title = "The packages of both services, floor by floor"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            f' aria-label="{title}" font-family="sans-serif" font-size="14">',
            f"<title>{title}</title>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="#444"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *(line for lines, _ in columns for line in lines),
            f'<text x="{width / 2:g}" y="{height - 14}" text-anchor="middle" font-size="12" fill="#555">'
            "A package imports those below it, never those above: import contracts check that."
            "</text>",
            "</svg>\n",
        ]
    )


def _column(service: str, found: Floors, left: int, fill: str, stroke: str) -> tuple[list[str], int]:
    """A service's boxes, and where they end."""
    centre, y = left + _WIDTH // 2, 44
    lines = [f'<text x="{centre}" y="28" text-anchor="middle" font-size="16" fill="#333">{service}</text>']
    for number, floor in enumerate(found):
        if number:
            lines.append(
                f'<line x1="{centre}" y1="{y}" x2="{centre}" y2="{y + _ARROW}" stroke="#444"'
                ' stroke-width="1.5" marker-end="url(#a)"/>'
            )
            y += _ARROW
        width = (_WIDTH - _GAP * (len(floor) - 1)) / len(floor)
        texts = [textwrap.wrap(_sentence(service, name), int(width / _CHARACTER)) for name in floor]
        height = 26 + _LINE * max(map(len, texts))
        for place, (name, text) in enumerate(zip(floor, texts, strict=True)):
            x = left + place * (width + _GAP)
            middle = f"{x + width / 2:g}"
            lines.append(
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{height}" rx="6" fill="{fill}"'
                f' stroke="{stroke}"/>'
            )
            lines.append(
                f'<text x="{middle}" y="{y + 18}" text-anchor="middle" font-weight="bold">{name}</text>'
            )
            lines += [
                f'<text x="{middle}" y="{y + 35 + _LINE * i}" text-anchor="middle" font-size="12">'
                f"{escape(words, quote=False)}</text>"
                for i, words in enumerate(text)
            ]
        y += height
    return lines, y


def _sentence(service: str, package: str) -> str:
    """The first sentence of the package's docstring, without its full stop."""
    said = ast.get_docstring(ast.parse((ROOT / service / package / "__init__.py").read_text()))
    assert said, f"{service}.{package} has no docstring"
    return " ".join(said.split()).partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    PICTURE.write_text(draw())
