"""`paceline models check`: whether a model can be served here, without loading it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.child_run import cause
from paceline.cli.common import console, fail
from paceline.cli.models.local import find_local
from paceline.cli.services import command

models = typer.Typer(no_args_is_help=True, help="Models on this machine.")


@models.callback()
def _models() -> None:
    """A group, also with one command."""


@models.command()
def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory, a GGUF file, or a name of `list`.")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Say whether a model can be served, or what is missing: weights, tokenizer, chat template, memory.

    Only configurations and headers are read. Ends with status 1 if the model can't be loaded.
    """
    local = None if Path(model).exists() else find_local(model)
    path = str(local.path) if local is not None else model
    found = _run("executor_service.backends.torch_backend.examine", [path], "")
    files = found.pop("tokenizer")
    found["chats"] = _examined_text(files) if files else None
    if as_json:
        console.print_json(json.dumps(found))
    else:
        for name, text in _lines(found):
            console.print(f"{name:14} {text}", highlight=False, markup=False, soft_wrap=True)
    if found["problem"]:
        raise typer.Exit(1)


def _run(module: str, arguments: list[str], sent: str) -> dict[str, Any]:
    """The JSON object that a module of a service prints."""
    done = subprocess.run(
        command(module, *arguments),
        input=sent,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends it
    )
    if done.returncode:
        fail(f"{module} ended with status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _examined_text(files: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler makes of a tokenizer's files, under its limits."""
    examine = command("scheduler_service.text.worker.examine")
    done = subprocess.run(examine, input=json.dumps(files).encode(), capture_output=True, check=False)
    if done.returncode == 0:
        return dict(json.loads(done.stdout))
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    how = cause(done.returncode) + (f", {said[:200]}" if said else "")
    return {"problem": f"reading it under a scheduler's limits of memory and processor time ended ({how})"}


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What was found, as names and texts."""
    lines = [("weights", f"no: {found['problem']}" if found["problem"] else _weights(found))]
    chats = found["chats"]
    problem = found["tokenizer_problem"] or (chats or {}).get("problem", "")
    lines.append(("tokenizer", f"no, so that texts can't be sent: {problem}" if problem else "yes"))
    if chats is not None and not problem:
        lines.append(("chats", _chats(chats)))
    if found["problem"]:
        return lines
    memory = [f"{_gigabytes(size)} in {dtype}" for dtype, size in found["weight_bytes"].items()]
    context, token = found["context_length"], found["kv_bytes_per_token"]
    pages = (
        f"{token / 1e3:.1f} KB a token, {_gigabytes(token * context)} for {context:,} tokens, half in 16 bits"
    )
    lines += [("memory", f"weights about {', '.join(memory)}"), ("", f"pages {pages}")]
    for device, title in (("cpu", "CPU"), ("cuda", "CUDA")):
        lines.append((title, f"yes: {', '.join(found['dtypes'][device])}"))
    return lines


def _weights(found: dict[str, Any]) -> str:
    quantized = f", {found['quantization']}" if found["quantization"] else ""
    size = f"{found['layers']} layers, {_parameters(found['parameters'])}"
    stored = _gigabytes(found["stored_bytes"])
    return f"yes: {found['architecture']}, {size}{quantized}, {stored} on the disk"


def _chats(chats: dict[str, Any]) -> str:
    if problem := chats["template_problem"]:
        return f"no: the chat template can't be used: {problem}"
    if not chats["chat"]:
        return "no: there is no chat template"
    unknown = "no: how the model writes calls is unknown" if chats["takes_tools"] else "no"
    return (
        f"yes; tools: {chats['tool_format'] or unknown}; reasoning: {'yes' if chats['reasoning'] else 'no'}"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _parameters(count: int) -> str:
    return (
        f"{count / 1e9:.1f} billion parameters" if count >= 1e9 else f"{count / 1e6:.0f} million parameters"
    )
