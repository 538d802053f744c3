"""A fleet's tokens: made where the spec names none, and checked before anything starts.

The schedulers' tokens file has hashes alone. A stack's own token has the right `directory`, with which it
announces its scheduler to the others; a stack is given the number of its line, never a token.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.bounded_files import others_may_read, read_bounded
from paceline.cli.stack_secrets import draw_token
from paceline.cli.token import entry
from service_kit.identity import token_hash
from service_kit.secrets import check_token
from service_kit.token_file import by_digest, read_tokens

from paceline_fleet.spec import FleetSpec, TokenFiles

CLIENT, ADMIN = "client", "admin"
ADMIN_IDENTITY = "admin"
"""The name under which a stack's supervisor calls its scheduler."""


def make_tokens(spec: FleetSpec) -> None:
    """Draw the tokens of a fleet whose spec names none, and those of stacks that it has more than before.

    `directory / "client-token"` and `"admin-token"` are for callers. Files that are there stay valid.
    """
    files, directory = spec.token_files, spec.directory
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    stacks = _lines(files.stacks) if files.stacks.exists() else []
    for name in (CLIENT, ADMIN):
        if not (directory / f"{name}-token").exists():
            _write(directory / f"{name}-token", draw_token() + "\n")
    stacks += [draw_token() for _ in range(spec.slots - len(stacks))]
    _write(files.stacks, "".join(f"{token}\n" for token in stacks))
    lines = [
        entry(
            f"fleet-{name}", read_bounded(directory / f"{name}-token").decode().strip(), admin=name == ADMIN
        )
        for name in (CLIENT, ADMIN)
    ]
    lines += [entry(f"stack-{slot}", token, directory=True) for slot, token in enumerate(stacks)]
    _write(files.clients, "".join(f"{line}\n" for line in lines))


def check_tokens(spec: FleetSpec) -> None:
    """Raises ValueError unless the named files have what the fleet needs; messages have no token."""
    if spec.tokens is None:
        return
    files = spec.tokens
    try:
        known = by_digest(read_tokens(files.clients))
        for entry_of in known.values():
            if entry_of.identity.name == ADMIN_IDENTITY:
                raise ValueError(f"{files.clients}: the name {ADMIN_IDENTITY} is that of each stack itself")
        stacks = _lines(files.stacks)
    except OSError as error:
        raise ValueError(f"tokens.stacks: {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"tokens: {error}") from None
    if others_may_read(files.stacks):
        raise ValueError(f"tokens.stacks: every user of this machine may read {files.stacks}: chmod 600")
    if len(stacks) < spec.slots:
        raise ValueError(
            f"tokens.stacks: {files.stacks} has {len(stacks)} tokens, and up to {spec.slots} stacks may be"
            " there at once"
        )
    for number, token in enumerate(stacks, 1):
        found = known.get(bytes.fromhex(token_hash(token)))
        if found is None or not found.identity.directory:
            raise ValueError(
                f"tokens.stacks: {files.stacks}, line {number}: {files.clients} has no entry with"
                " `directory: true` for it (`paceline token NAME --directory` draws both)"
            )


def stack_token(files: TokenFiles, slot: int) -> str:
    """The token of a stack, read when it is used. Raises ValueError or OSError."""
    tokens = _lines(files.stacks)
    if slot >= len(tokens):
        raise ValueError(f"{files.stacks} has {len(tokens)} tokens: none for stack {slot}")
    return tokens[slot]


def _lines(path: Path) -> list[str]:
    tokens = read_bounded(path).decode(errors="replace").split()
    for number, token in enumerate(tokens, 1):
        check_token(f"{path}, line {number}", token)
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{path}: a token is given twice")
    return tokens


def _write(path: Path, text: str) -> None:
    """Write a file that its user alone may read, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)
