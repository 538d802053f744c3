"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import sys

import typer
from rich.markup import escape

from paceline import errors
from paceline.chat import Message
from paceline.cli.answer import StreamedAnswer, write
from paceline.cli.common import (
    Addresses,
    advice,
    console,
    fail,
    one_line_errors,
    security,
    stderr,
)
from paceline.cli.generate import (
    DrafterChoice,
    MaxTokens,
    Mode,
    Seed,
    System,
    Temperature,
    TopP,
    options,
    speculation,
)
from paceline.cli.inputs import Adapter
from paceline.cli.loading import wait_for_model
from paceline.client import Client
from paceline.requests import Options
from paceline.types import Delta

_HELP = """[dim]/reset  forgets the conversation
/quit   leaves, as Ctrl-D does
/help   shows this
Ctrl-C  stops an answer[/]"""
_COMMAND = re.compile(r"/[a-z]+")
"""What is taken for a command. Other lines that begin with a slash, as paths, go to the model."""


def chat(
    context: typer.Context,
    addresses: Addresses,
    system: System = None,
    model: Adapter = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    mode: Mode = None,
    drafter: DrafterChoice = None,
) -> None:
    """Talk with the model.

    The whole conversation is sent each turn; the prefix cache makes that cheap.
    """
    chosen = options(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        speculation=speculation(mode, drafter),
    )
    address = ", ".join(addresses)
    with one_line_errors(address), Client(addresses, security=security(context)) as client:
        wait_for_model(client)
        info = client.model_info(timeout_s=10)
        if not info.has_chat_template:
            fail(f"{info.name} has no chat template; use `paceline generate`")
        console.print(
            f"[bold]{escape(model or info.name)}[/] at {address} [dim]/help: commands, Ctrl-D: leave[/]",
            highlight=False,
        )
        opening = [Message("system", system)] if system is not None else []
        _converse(client, opening, chosen, address)


def _converse(client: Client, opening: list[Message], chosen: Options, address: str) -> None:
    history = opening
    while (line := _ask()) is not None:
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                history = opening
                console.print("[dim]forgotten[/]")
                continue
            case "/help":
                console.print(_HELP, highlight=False)
                continue
            case command if _COMMAND.fullmatch(command):
                console.print(f"[dim]there is no {command}[/]", _HELP, sep="\n", highlight=False)
                continue
        asked = [*history, Message("user", line)]
        try:
            answer = _answer(client, asked, chosen)
        except errors.PacelineError as error:
            stderr.print(advice(error, address), style="bold red", markup=False, highlight=False)
            continue  # the failed turn is not added to the history
        history = [*asked, Message("assistant", answer)]


def _ask() -> str | None:
    """The user's next line; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(client: Client, asked: list[Message], chosen: Options) -> str:
    """Stream one answer to the terminal and return it. Ctrl-C ends it early."""
    answer, text = StreamedAnswer(), ""
    with client.generate(messages=asked, **chosen) as generation:
        try:
            for event in generation:
                if isinstance(event, Delta):
                    answer.add(event)
                    text += event.text
        except KeyboardInterrupt:
            write(" [stopped]")
    write("\n")
    return text
