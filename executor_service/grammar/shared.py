"""`SharedSchemas`: parts of a JSON schema that stand in many places and are compiled once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from executor_service.grammar.source import GrammarInvalid

_MAX_WORK = 50_000  # arrays listed, values looked for, places of `contains`; takes 50 ms
_PLACE = "#/$defs/"
_NAMES = "paceline."  # what the names of definitions begin with


class SharedSchemas:
    """Definitions to add to one schema, the root."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # by content
        self._definitions: dict[str, Any] = {}
        self._new: list[Any] = []
        self._kept: set[int] = set()  # by `id`
        self._work = 0
        # A reference would not lead to the root from a schema with an address of its own.
        apart = (node for node in _objects(root) if node is not root and _stands_apart(node))
        self._possible = isinstance(root, dict) and _has_room(root) and next(apart, None) is None

    def spend(self, work: int) -> None:
        """Count work that a schema's size does not bound. Raises GrammarInvalid when it is too much."""
        self._work += work
        if self._work > _MAX_WORK:
            raise GrammarInvalid("uniqueItems and contains: too many arrays to list")

    def keep_branches(self, schema: dict[str, Any]) -> None:
        """Let the branches of `oneOf`, and their properties, stand where they are.

        What excludes one from another, as it must be there for the engine, is not looked for in definitions.
        """
        left = [(branch, 0) for branch in _members(schema, ("oneOf",))]
        while left:
            node, depth = left.pop()
            if isinstance(node, dict) and id(node) not in self._kept:
                self._kept.add(id(node))
                left += [(part, depth) for part in _members(node, ("anyOf", "oneOf", "allOf"))]
                if not depth and isinstance(properties := node.get("properties"), dict):
                    left += [(each, 1) for each in properties.values()]

    def replace(self, schema: dict[str, Any], keywords: frozenset[str]) -> None:
        """Replace these narrowed keywords of a schema, in place, by a reference to what they say."""
        content = {keyword: schema[keyword] for keyword in sorted(keywords & schema.keys())}
        if id(schema) not in self._kept and (reference := self._refer(content)) is not None:
            for keyword in content:
                del schema[keyword]
            schema.update(reference)

    def reference(self, schema: Any) -> dict[str, Any] | None:
        """A schema that refers to this one, which becomes a definition; None: that is not possible here."""
        reference = self._refer(schema)
        if reference is not None:
            self._new.append(schema)
        return reference

    def _refer(self, schema: Any) -> dict[str, str] | None:
        """A reference to the definition with this content, made if there is none; None: not possible here."""
        if not self._possible:
            return None
        content = json.dumps(schema, sort_keys=True)
        name = self._names.get(content)
        if name is None:
            name = self._names[content] = f"{_NAMES}{len(self._names)}"
            self._definitions[name] = schema
        return {"$ref": f"{_PLACE}{name}"}

    def target(self, reference: str) -> Any:
        """What a reference into the root, or to a definition, leads to; None: it is not found so simply."""
        if reference.startswith(_PLACE + _NAMES) and reference[len(_PLACE) :] in self._definitions:
            return self._definitions[reference[len(_PLACE) :]]
        target = self._root if reference.startswith("#/") else None
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        return target

    def take_new(self) -> list[Any]:
        """The definitions since the last call that are not narrowed yet."""
        new, self._new = self._new, []
        return new

    def add(self) -> None:
        """Add the definitions to the root."""
        if self._definitions:
            self._root["$defs"] = {**self._root.get("$defs", {}), **self._definitions}


def _members(schema: dict[str, Any], keywords: Iterable[str]) -> list[Any]:
    return [part for keyword in keywords if isinstance(parts := schema.get(keyword), list) for part in parts]


def _stands_apart(node: dict[str, Any]) -> bool:
    return isinstance(node.get("$id"), str) or isinstance(node.get("id"), str)


def _has_room(root: dict[str, Any]) -> bool:
    definitions = root.get("$defs", {})
    return isinstance(definitions, dict) and not any(name.startswith(_NAMES) for name in definitions)


def _objects(root: Any) -> list[dict[str, Any]]:
    """All objects in a schema, itself included."""
    left, found = [root], []
    while left:
        node = left.pop()
        if isinstance(node, dict):
            found.append(node)
            left += node.values()
        elif isinstance(node, list):
            left += node
    return found
