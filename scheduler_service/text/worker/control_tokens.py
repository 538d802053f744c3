"""Control tokens come from the chat template alone: text of messages that spells one stays plain text.

A template writes its own control tokens and the messages' contents into one text, where they can't be split
apart: content may spell a token, or a part of one that the template or the next message completes. So a chat
whose contents hold parts of control tokens is rendered a second time, *marked*: in the contents, each
character that occurs in control tokens is replaced by one of a private-use area (a mark).

- If both renderings have control tokens at the same positions, all of them are the template's, and the first
  rendering is tokenized unchanged.
- Otherwise the marked rendering is used: its control tokens are replaced by random names, the marks by the
  original characters, and a tokenizer that knows the control tokens only by these names encodes the result.

In both cases the control tokens of the resulting ids are compared with those that the template wrote; they
must be the same in the same order.

White space is not marked, because templates trim it. String literals of the template are not marked, because
templates split contents at them (`</think>`), unless they could be a part of a control token. Keys of nested
mappings (of a tool, of a call's arguments) are marked, unless the template looks them up.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

MARKS = 0xF0000
"""Code point of the first mark."""

_PIPED = re.compile(r"<[|｜][^\s<>]+[|｜]>")


@dataclass(frozen=True, slots=True)
class Span:
    """A control token in a text."""

    start: int
    end: int
    id: int


class ControlTokens:
    """A tokenizer's control tokens, and the marking of text that could be mistaken for a part of one.

    Control tokens are the tokens that the tokenizer marks as special, and added tokens of the form
    `<|name|>` that the template contains. `quoted`: the template's string literals; `names`: the keys that it
    looks up.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str, quoted: Iterable[str], names: Iterable[str] = ()
    ) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.ids = {
            token.content: id_
            for id_, token in added.items()
            if token.content
            and (token.special or (_PIPED.fullmatch(token.content) and token.content in template))
        }
        """Ids by text."""
        texts = self.ids.keys()
        self._pattern = re.compile(_longest_of(token.content for token in added.values() if token.content))
        self._ends = {text[:1] for text in texts} | {text[-1:] for text in texts}
        pairs = {text[:2] for text in texts} | {text[-2:] for text in texts}
        self._parts = re.compile(_longest_of(pairs))
        self._joined = "\0".join(texts)
        heads = {text[:size] for text in texts for size in range(1, len(text))}
        tails = {text[size:] for text in texts for size in range(1, len(text))}
        safe = (string for string in quoted if string and not self._touches(string, heads, tails))
        self._safe = re.compile(f"({_longest_of(safe)})")
        # A key among those that the template names can only spell a word of a token, unless one is a word.
        is_word = any(text.isidentifier() for text in texts)
        self._plain_keys = frozenset[str]() if is_word else frozenset(filter(str.isidentifier, names))
        alphabet = sorted({character for text in texts for character in text if not character.isspace()})
        self._mark = {ord(character): MARKS + rank for rank, character in enumerate(alphabet)}
        self._unmark = {mark: character for character, mark in self._mark.items()}
        self._private = re.compile(f"[{chr(MARKS)}-{chr(MARKS + len(alphabet))}]")

    def _touches(self, string: str, heads: set[str], tails: set[str]) -> bool:
        """Whether the string contains a control token, or could be a part of one in a longer text."""
        return (
            string in self._joined
            or any(text in string for text in self.ids)
            or any(string[-size:] in heads or string[:size] in tails for size in range(1, len(string)))
        )

    def spans(self, text: str) -> list[Span]:
        """The control tokens in a text as the tokenizer finds them: leftmost first, and the longest there."""
        ids = self.ids
        found = self._pattern.finditer(text)
        return [Span(*match.span(), ids[match[0]]) for match in found if match[0] in ids]

    def doubtful(self, value: object) -> bool:
        """Whether any string in `value` may contribute to a control token, wherever a template cuts it."""
        return any(self._doubtful(text) for text in _strings(value))

    def _doubtful(self, text: str) -> bool:
        bare = text.strip()
        return bool(bare) and (
            bare[0] in self._ends
            or bare[-1] in self._ends
            or self._parts.search(bare) is not None
            or bare in self._joined
        )

    def has_marks(self, value: object) -> bool:
        """Whether any string in `value` contains characters that are used as marks."""
        return any(self._private.search(text) for text in _strings(value))

    def marked_values(self, fields: Mapping[str, object]) -> dict[str, object]:
        """The mapping with the strings in its values marked. Its own keys are not the client's."""
        return {key: self._marked(value) for key, value in fields.items()}

    def _marked(self, value: object) -> object:
        match value:
            case str():
                # re.split puts the safe strings at odd indices.
                parts = self._safe.split(value)
                return "".join(
                    part if at % 2 else part.translate(self._mark) for at, part in enumerate(parts)
                )
            case Mapping():
                return {
                    key if key in self._plain_keys else self._marked(key): self._marked(item)
                    for key, item in value.items()
                }
            case list() | tuple():
                return [self._marked(item) for item in value]
        return value

    def unmarked(self, text: str) -> str:
        """The text with marks replaced by the original characters."""
        return text.translate(self._unmark)


class RenamedTokenizer:
    """A copy of a tokenizer whose control tokens have random names; their original texts are plain text."""

    def __init__(self, tokenizer: Tokenizer, control: ControlTokens) -> None:
        secret = secrets.token_hex(8)
        self.names = {id_: f"{chr(MARKS - 1)}{secret}-{id_}{chr(MARKS - 1)}" for id_ in control.ids.values()}
        """Random names by control token id."""
        self._tokenizer = renamed = Tokenizer.from_str(_renamed(tokenizer.to_str(), control.ids, self.names))
        originals = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()} | {
            name: id_ for id_, name in self.names.items()
        }
        self._originals = {
            id_: originals[token.content] for id_, token in renamed.get_added_tokens_decoder().items()
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as ids of the original tokenizer."""
        originals = self._originals
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [originals.get(id_, id_) for id_ in ids]

    def named(self, text: str, spans: Sequence[Span], restored: Callable[[str], str]) -> str:
        """A text for `encode`: spans replaced by their random names, and `restored` applied to the rest."""
        parts: list[str] = []
        at = 0
        for span in spans:
            parts += restored(text[at : span.start]), self.names[span.id]
            at = span.end
        return "".join((*parts, restored(text[at:])))


def _renamed(tokenizer_json: str, ids: Mapping[str, int], names: Mapping[int, str]) -> str:
    """The tokenizer's JSON with its control tokens (`ids` by text) renamed to `names` (by id).

    They are renamed in added tokens and vocabulary; merges that involve them are removed.
    """
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    name = {text: names[id_] for text, id_ in ids.items()}
    for added in tokenizer["added_tokens"]:
        if added["content"] in name:
            added |= {"content": name[added["content"]], "special": True, "normalized": False}
    tokenizer["post_processor"] = None  # it names special tokens, and is not used
    model = tokenizer["model"]
    vocabulary = model.get("vocab")
    unknown = model.get("unk_token")  # stands for text that the vocabulary lacks
    rename = {old: new for old, new in name.items() if old != unknown}
    if isinstance(vocabulary, dict):
        model["vocab"] = {rename.get(piece, piece): id_ for piece, id_ in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: pieces with scores
        unknown_id = model.get("unk_id")
        model["vocab"] = [
            [piece if at == unknown_id else rename.get(piece, piece), score]
            for at, (piece, score) in enumerate(vocabulary)
        ]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _merges_into(merge, rename)]
    return json.dumps(tokenizer, ensure_ascii=False)


def _merges_into(merge: str | Sequence[str], rename: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in rename or right in rename or left + right in rename


def _strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield key
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _longest_of(strings: Iterable[str]) -> str:
    """A regular expression for the longest of these strings; its time does not depend on their number."""
    tree: dict[str, Any] = {}
    for string in strings:
        node = tree
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(tree) if tree else "(?!)"


def _pattern_of(node: dict[str, Any]) -> str:
    literal = ""
    while len(node) == 1 and "" not in node:  # a chain needs no groups
        ((character, node),) = node.items()
        literal += re.escape(character)
    branches = [re.escape(character) + _pattern_of(child) for character, child in node.items() if character]
    if not branches:
        return literal
    return f"{literal}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
