"""`paceline generate`: one prompt, streamed to stdout."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from paceline.chat import Message
from paceline.cli.answer import StreamedAnswer, calls, write, write_reasoning
from paceline.cli.common import Addresses, TimeoutS, client_of, fail, stderr, warn
from paceline.cli.inputs import Adapter
from paceline.cli.loading import wait_for_model
from paceline.cli.rows import counted
from paceline.generation import Generation
from paceline.requests import Options
from paceline.types import Delta, Drafter, Event, Finished, FinishReason, Speculation, Usage

Temperature = Annotated[float | None, typer.Option("--temperature", "-t", min=0.0, help="0 is greedy.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Of an answer.")]
MAX_TOKENS = 512
"""Of an answer, unless a user says more: a small model may go on for ever."""
TopP = Annotated[float | None, typer.Option("--top-p", min=0.0, max=1.0)]
TopK = Annotated[int | None, typer.Option("--top-k", min=0, help="0 is off.")]
MinP = Annotated[float | None, typer.Option("--min-p", min=0.0, max=1.0)]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="The same seed gives the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text. Repeatable.")]
Mode = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        metavar="off|auto|N",
        help="Draft tokens: never, as a controller decides, or N per step. The output is the same.",
        show_default="the server's",
    ),
]
DrafterChoice = Annotated[
    Drafter | None, typer.Option("--drafter", help="The drafter to use.", show_default="all of the server")
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--schema", metavar="FILE", exists=True, dir_okay=False, help="JSON schema of the output."),
]
Regex = Annotated[str | None, typer.Option("--regex", help="Regular expression for all of the output.")]
GrammarFile = Annotated[
    Path | None,
    typer.Option(
        "--grammar", metavar="FILE", exists=True, dir_okay=False, help="Lark grammar of the output."
    ),
]
ToolsFile = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="What the model may call, as a JSON list; calls are printed. Needs --chat.",
    ),
]
ToolChoice = Annotated[
    str | None,
    typer.Option("--tool-choice", metavar="auto|none|required|NAME", help="Whether it calls, and what."),
]
Choice = Annotated[list[str] | None, typer.Option("--choice", help="The output is one of these. Repeatable.")]
System = Annotated[str | None, typer.Option("--system", help="A system message.")]


def options(**given: Any) -> Options:
    """The options that are not None; others keep the model's defaults."""
    return cast(Options, {name: value for name, value in given.items() if value is not None})


def speculation(mode: str | None, drafter: Drafter | None) -> Speculation | None:
    """The Speculation of --speculation and --drafter; None if neither is given."""
    if mode is None and drafter is None:
        return None
    if mode is None or mode in ("off", "auto"):
        return Speculation(cast(Literal["off", "auto"] | None, mode), drafter)
    if not mode.isdecimal():
        fail(f"--speculation: expected off, auto or a number, got {mode!r}", 2)
    return Speculation(int(mode), drafter)


def _read(path: Path, option: str) -> str:
    """The text of a file. Exits with an error if it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{option}: {path}: {error}", 2)


def _read_tools(path: Path) -> list[Any]:
    """The tools in a JSON file. Exits with an error if it is unreadable, no JSON or no list."""
    try:
        tools = json.loads(_read(path, "--tools"))
    except (ValueError, RecursionError) as error:
        fail(f"--tools: {path}: {error}", 2)
    if not isinstance(tools, list):
        fail(f"--tools: {path}: expected a list of tools", 2)
    return tools


def generate(
    context: typer.Context,
    addresses: Addresses,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. Default, or '-': read it from stdin.")
    ] = None,
    *,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Through the model's chat template, or as it is.")
    ] = False,
    system: System = None,
    model: Adapter = None,
    max_tokens: MaxTokens = MAX_TOKENS,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    mode: Mode = None,
    drafter: DrafterChoice = None,
    schema: SchemaFile = None,
    regex: Regex = None,
    choice: Choice = None,
    grammar: GrammarFile = None,
    tools: ToolsFile = None,
    tool_choice: ToolChoice = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Completions; several are printed when done.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per event; the first has the request's id.")
    ] = False,
    usage: Annotated[
        bool,
        typer.Option(
            "--usage",
            help="Say all of what it took on stderr; implied by --speculation, --drafter."
            " A terminal is shown the speed in any case.",
        ),
    ] = False,
    timeout_s: TimeoutS = None,
) -> None:
    """Complete a prompt, streaming.

    paceline generate --chat "What is the capital of France?"
    """
    if system is not None and not chat:
        fail("--system needs --chat: raw prompts have no roles", 2)
    if (tools or tool_choice) and not chat:
        fail("--tools and --tool-choice need --chat: the model's chat template tells it of tools", 2)
    if prompt in (None, "-"):
        prompt = "" if sys.stdin.isatty() else sys.stdin.read()
        if chat:  # echo ends a line, and the question is none of it
            prompt = prompt.removesuffix("\n")
    if not prompt:
        fail('give a prompt: paceline generate --chat "Why is the sky blue?", or pipe one in', 2)
    if sum(given is not None for given in (schema, regex, choice or None, grammar)) > 1:
        fail("--schema, --regex, --choice or --grammar: one of them", 2)
    messages = [Message("system", system)] if system is not None else []
    messages.append(Message("user", prompt))
    chosen = options(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
        n=n,
        schema=_read(schema, "--schema") if schema is not None else None,
        regex=regex,
        choices=choice or None,
        grammar=_read(grammar, "--grammar") if grammar is not None else None,
        tools=_read_tools(tools) if tools is not None else None,
        tool_choice=tool_choice,
        speculation=speculation(mode, drafter),
    )
    with client_of(context, addresses) as client:
        wait_for_model(client)
        text, turns = (None, messages) if chat else (prompt, None)
        with client.generate(text, messages=turns, timeout_s=timeout_s, **chosen) as generation:
            ends = _show(generation, as_json=as_json, streaming=n == 1)
            for warning in generation.started.warnings if generation.started else ():
                warn(warning)
        empty = not any(one.text for one in generation.collect())
        explains = (stderr.is_terminal or empty) and not (chat or as_json)
        if explains and "chat" in client.model_info().capabilities:
            stderr.print("The prompt was continued as it stands: --chat asks the model.", style="dim")
    for end in [] if as_json else ends:
        if end.reason is FinishReason.LENGTH:
            stderr.print(cut_line(end.usage, "-m N allows more"), style="dim", markup=False, highlight=False)
    in_full = bool(usage or mode or drafter)
    if in_full or (stderr.is_terminal and not as_json):
        for end in ends:
            line = _usage_line(end, generation.request_id()) if in_full else _speed_line(end.usage)
            stderr.print(line, style="dim", highlight=False, soft_wrap=True)


def _show(generation: Generation, *, as_json: bool, streaming: bool) -> list[Finished]:
    """Print the events as JSON lines, the text as it arrives, or at the end one completion after the other.

    Returns the ends of the completions, ordered by index.
    """
    if as_json:  # at once: `paceline why` explains what it waits for
        write(json.dumps({"event": "sent", "request_id": generation.request_id()}) + "\n")
    with StreamedAnswer(generation.request_id()) as answer:
        for event in generation:
            answer.came()
            if as_json:
                write(_as_line(event) + "\n")
            elif streaming and isinstance(event, Delta):
                answer.add(event)
    completions = generation.collect()
    for one in completions:
        if not as_json and streaming:
            answer.end(one)
        elif not as_json:
            write_reasoning(one.reasoning + "\n" if one.reasoning else "")
            write(f"── {one.index} ──\n{one.text}\n{calls(one.tool_calls)}")
    return [one.finished for one in completions if one.finished is not None]


def _as_line(event: Event) -> str:
    """An event as one line of JSON."""
    kind = "delta" if isinstance(event, Delta) else "finished"
    return json.dumps({"event": kind, **dataclasses.asdict(event)}, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(type(value).__name__)


def cut_line(usage: Usage, how: str) -> str:
    """That an answer has all tokens that it may have, and how to get more."""
    return f"[cut at {counted(usage.completion_tokens, 'token')}; {how}]"


def _speed_line(usage: Usage) -> str:
    """Tokens, time to first token, and the rate after it."""
    after_ms = usage.total_ms - usage.first_token_ms
    rate = f", then {(usage.completion_tokens - 1) * 1e3 / after_ms:.0f} tokens/s" if after_ms > 0 else ""
    return f"{counted(usage.completion_tokens, 'token')}, first after {usage.first_token_ms} ms{rate}"


def _usage_line(end: Finished, request_id: str) -> str:
    """All of what it took, and the id by which `paceline why` explains where its time went."""
    usage = end.usage
    return (
        f"{counted(usage.prompt_tokens, 'prompt token')} ({usage.cached_tokens} cached),"
        f" {usage.completion_tokens} generated, first after {usage.first_token_ms} ms,"
        f" all after {usage.total_ms} ms, ended by {end.reason.value}{drafts(usage)}; request {request_id}"
    )


def drafts(usage: Usage) -> str:
    """Counts of drafted and accepted tokens, as the end of a sentence; empty without drafts."""
    if not usage.verifications:
        return ""
    shares = " ".join(f"{share:.0%}" for share in usage.acceptance_by_position)
    return (
        f"; {usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted in"
        f" {counted(usage.verifications, 'verification')} (by position {shares})"
    )
