"""How often a JSON schema's references lead to alternatives: work for a token that the library doesn't count.

Its parser looks through a row of items for each alternative of what is referred to, and for each reference
that may stand here: 900 arrays in one `anyOf`, all of items that are this `anyOf`, took 2 s for a "[".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from executor_service.grammar.source import GrammarInvalid

_MAX_WORK = 60_000
"""Takes 60 ms for a token if all of it can stand there."""


def check_references(schema: Any) -> None:
    """Raises GrammarInvalid if references times the alternatives they lead to are too many."""
    nodes = list(_nodes(schema))
    references = Counter(
        ref for node in nodes if isinstance(node, dict) and isinstance(ref := node.get("$ref"), str)
    )
    if not references:
        return
    alternatives = _alternatives(nodes)
    work = sum(count * (1 + alternatives[id(_target(schema, ref))]) for ref, count in references.items())
    if work > _MAX_WORK:
        raise GrammarInvalid(
            f"references times the members of anyOf and oneOf that they lead to: at most {_MAX_WORK} in all, "
            f"has {work}"
        )


def _target(schema: Any, ref: str) -> Any:
    """What a reference leads to; all of the schema where it is not found so simply."""
    target = schema
    for part in ref.removeprefix("#").split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target if isinstance(target, dict | list) else schema


def _alternatives(nodes: list[Any]) -> dict[int, int]:
    """By `id`: the members of every `anyOf` and `oneOf` in a node, not only of those at its start."""
    counts: dict[int, int] = {}
    for node in reversed(nodes):  # what is in it comes first
        own = 0
        if isinstance(node, dict):
            own = sum(len(some) for key in ("anyOf", "oneOf") if isinstance(some := node.get(key), list))
        counts[id(node)] = own + sum(counts.get(id(child), 0) for child in _children(node))
    return counts


def _nodes(schema: Any) -> Iterator[Any]:
    """All objects and arrays in a schema, itself included, each before what is in it."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict | list):
            yield node
            left += _children(node)


def _children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node
