"""What a model or a service writes can't give orders to the user's terminal."""

from __future__ import annotations

import io
import sys

import pytest
from paceline import errors
from paceline.channel import PLAINTEXT
from paceline.chat import ToolCall
from paceline.cli import write_any_text
from paceline.cli.answer import StreamedAnswer
from paceline.cli.common import advice
from paceline.cli.safe_text import SafeConsole, shown
from paceline.types import Completion, Delta
from rich.markup import escape
from rich.table import Table
from rich.text import Text

ORDERS = ["\x1b]52;c;aGk=\x07", "\x1b]0;title\x1b\\", "\x1b[2J", "\x9b2J", "\rover", "\x08\x7f", "\x85"]


class Terminal(io.StringIO):
    """A stdout, for example a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_is_escaped_on_a_terminal_alone(
    order: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    answer = StreamedAnswer("id")
    for part in order:
        answer.add(Delta(0, (1,), part))
    answer.end(Completion(0, order, (1,), (), None, tool_calls=(ToolCall("a", "f", order),)))
    text = f"{order}\nf {order}\n"
    assert terminal.getvalue() == (shown(text) if is_terminal else text)


def test_text_without_orders_is_as_it_was() -> None:
    text = "tab\tline\nGrüße 日本語 🙂 a\u00a0b \\x1b"
    assert shown(text) == text
    assert shown(shown("\x1b")) == r"\x1b"


@pytest.mark.parametrize("order", ORDERS)
def test_a_console_obeys_no_text(order: str) -> None:
    table = Table(order)
    table.add_row(order, Text(order))
    for printed in (order, Text(order, style="red"), table, escape(order)):
        terminal = Terminal(is_terminal=True)
        console = SafeConsole(file=terminal, force_terminal=True, width=80)
        console.print(printed, soft_wrap=True)
        console.out(order, style="dim")
        found = terminal.getvalue()
        assert not any(begin in found for begin in ("\x1b]", "\x1b[2J", "\x9b", "\x07", "\r", "\x08", "\x7f"))


def test_a_console_keeps_its_own_styles() -> None:
    terminal = Terminal(is_terminal=True)
    console = SafeConsole(file=terminal, force_terminal=True, color_system="standard")
    told = escape(advice(PLAINTEXT, errors.InternalError(ORDERS[0]), "a:1"))
    console.print(f"[bold red]paceline:[/] {told}", highlight=False)
    assert terminal.getvalue().startswith("\x1b[1;31mpaceline:\x1b[0m the service failed: \\x1b]52;")


@pytest.mark.parametrize(("is_terminal", "written"), [(True, b"caf? ?"), (False, b"caf\\xe9 \\u2026")])
def test_what_an_encoding_lacks_ends_no_command(
    is_terminal: bool, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    stdout = io.TextIOWrapper(content, encoding="ascii")
    monkeypatch.setattr(stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    write_any_text()
    print("café …", end="", flush=True)
    assert content.getvalue() == written
