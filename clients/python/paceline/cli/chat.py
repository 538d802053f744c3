"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import typer
from rich.markup import escape

from paceline import errors
from paceline.channel import Security
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
from paceline.cli.conversation import COMMANDS, HELP, WITH_WORDS, Conversation, Refused, command_of
from paceline.cli.generate import (
    MAX_TOKENS,
    DrafterChoice,
    MaxTokens,
    Mode,
    Seed,
    System,
    Temperature,
    TopP,
    cut_line,
    options,
    speculation,
)
from paceline.cli.inputs import Adapter
from paceline.cli.loading import wait_for_model
from paceline.cli.safe_text import shown
from paceline.cli.typed_lines import ask, editing
from paceline.client import Client
from paceline.requests import Options
from paceline.types import Delta, Finished, FinishReason


def chat(
    context: typer.Context,
    addresses: Addresses,
    system: System = None,
    model: Adapter = None,
    max_tokens: MaxTokens = MAX_TOKENS,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    mode: Mode = None,
    drafter: DrafterChoice = None,
) -> None:
    """Talk with the model.

    The whole conversation is sent each turn; the prefix cache makes that cheap. /help lists what can be done
    in it: retry, undo, save, load, set options. On a terminal lines can be edited, and earlier ones are found
    again, also those of earlier chats: ~/.local/state/paceline/chat has them.
    """
    chosen = options(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        speculation=speculation(mode, drafter),
    )
    address, secured = ", ".join(addresses), security(context)
    with one_line_errors(secured, address), Client(addresses, security=secured) as client:
        wait_for_model(client)
        info = client.model_info(timeout_s=10)
        if not info.has_chat_template:
            fail(f"{info.name} has no chat template; use `paceline generate`")
        served = {*client.models(timeout_s=10), *(one.name for one in info.adapters)}
        if model is not None and model not in served:
            fail(f"model: {model!r} is not served; served: {', '.join(sorted(served))}")
        _note(f"[bold]{escape(model or info.name)}[/] at {address} [dim]/help: commands, Ctrl-D: leave[/]")
        with editing(COMMANDS):
            _converse(client, Conversation(chosen, system or ""), secured, address)


def _converse(client: Client, conversation: Conversation, secured: Security, address: str) -> None:
    while (line := ask()) is not None:
        question: str | None = line
        before = [*conversation.turns]
        if (command := command_of(line)) is not None:
            if command[0] in ("/quit", "/exit"):
                return
            try:
                question = _obey(conversation, *command)
            except Refused as refused:
                _note(f"[dim]{escape(shown(str(refused)))}[/]")
                continue
        if question is None or not question.strip():
            continue
        try:
            answer = _answer(client, conversation.asking(question), conversation.options)
        except errors.PacelineError as error:
            stderr.print(advice(secured, error, address), style="bold red", markup=False, highlight=False)
            conversation.turns = before  # a failed question is not added, and /retry has not taken one away
            continue
        if command is not None and answer == before[-1].content:  # /retry
            note = "[the same answer, as with a seed or at temperature 0: /set temperature 0.7]"
            stderr.print(note, style="dim", markup=False, highlight=False)
        conversation.answered(question, answer)


def _obey(conversation: Conversation, command: str, words: str) -> str | None:
    """Do it, and say so; returns the question of /retry. Raises Refused."""
    if command in ("/save", "/load") and not words:
        raise Refused(f"{command} FILE")
    if words and command in COMMANDS and command not in (*WITH_WORDS, "/help"):
        raise Refused(f"{command} takes nothing after it")
    match command:
        case "/retry":
            return conversation.undo()
        case "/reset":
            conversation.turns, said = [], "forgotten"
        case "/undo":
            said = f"forgotten: {conversation.undo()}"
        case "/system":
            conversation.system = words
            said = "from the next answer on" if words else "no system message from the next answer on"
        case "/set":
            said = conversation.set(words)
        case "/save":
            said = conversation.save(words)
        case "/load":
            said = conversation.load(words)
        case "/help":
            said = HELP
        case _:
            raise Refused(f"there is no {command}\n{HELP}")
    _note(f"[dim]{escape(shown(said))}[/]")
    return None


def _note(text: str) -> None:
    """What is no answer: on stderr where the answers go into a pipe or a file."""
    (console if console.is_terminal else stderr).print(text, highlight=False, soft_wrap=True)


def _answer(client: Client, asked: list[Message], chosen: Options) -> str:
    """Stream one answer to the terminal and return it. Ctrl-C ends it early."""
    text = cut = ""
    generating = client.generate(messages=asked, **chosen)
    with generating as generation, StreamedAnswer(generation.request_id()) as answer:
        try:
            for event in generation:
                if isinstance(event, Delta):
                    answer.add(event)
                    text += event.text
                elif isinstance(event, Finished) and event.reason is FinishReason.LENGTH:
                    cut = cut_line(event.usage, "/set max_tokens N allows more")
        except KeyboardInterrupt:
            write(" [stopped]")
    write("\n")
    if cut:
        stderr.print(cut, style="dim", markup=False, highlight=False)
    return text
