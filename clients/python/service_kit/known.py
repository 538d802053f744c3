"""Finds unknown settings in the environment and on the command line, and suggests the nearest known name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

_GONE = (
    "; the OpenAI API is served by `paceline serve --openai PORT`, or by `paceline gateway ADDRESS...`, which"
    " calls the scheduler's own port"
)
"""About settings of earlier versions, `--gateway-port` and others."""
_KUBERNETES_VARIABLE = re.compile(r"(^|_)(service_(host|port)|port_\d+_(tcp|udp))(_|$)")


def nearest(name: str, known: Collection[str]) -> str:
    """A suggestion to append to an error message about a setting: a similar name, or what became of it."""
    if name.lower().lstrip("-").replace("-", "_").removeprefix("paceline_scheduler_").startswith("gateway_"):
        return _GONE
    return similar(name, known)


def similar(name: str, known: Collection[str]) -> str:
    """A suggestion to append to an error message: "; did you mean NAME?", or "" if no name is similar."""
    given = name.lower().lstrip("-")  # which all options share
    sought = {one.lower().lstrip("-"): one for one in sorted(known, reverse=True)}
    beginnings = {one[: len(given)]: whole for one, whole in sought.items()}
    for names in (sought, beginnings):  # of a long name, many type the beginning
        if near := difflib.get_close_matches(given, names, n=1, cutoff=0.6 if names is sought else 0.8):
            return f"; did you mean {names[near[0]]}?"
    return ""


def unknown_variables(names: Iterable[str], prefix: str, fields: Collection[str]) -> list[str]:
    """An error message for each environment variable that begins with `prefix` and is not a setting."""
    known = {prefix + field.upper() for field in fields}
    problems = []
    for name in sorted(names):
        if not name.upper().startswith(prefix) or name.upper() in known:
            continue
        hint = nearest(name.upper(), known)
        if _KUBERNETES_VARIABLE.search(name.lower().removeprefix(prefix.lower())):
            hint = " (made by Kubernetes for a Service of this name? enableServiceLinks: false)"
        problems.append(f"{name}: no such setting{hint}")
    return problems


def unknown_flags(arguments: Sequence[str], fields: Collection[str], switches: Collection[str]) -> list[str]:
    """An error message for each flag that is not a setting. Abbreviated flags are refused too."""
    known = {"--help"} | {_flag(field) for field in fields} | {f"--no-{_flag(name)[2:]}" for name in switches}
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return [
        f"{flag}: no such setting{nearest(flag, known) or '; --help lists all'}"
        for flag in given
        if flag not in known
    ]


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
