"""How much work the rules of a Lark grammar can make of one token; the library counts none of it.

Its parser keeps a row of items after each terminal. An item in front of a rule tries all alternatives of
that rule, and each alternative that ends tries all places where the rule stands. Trying means to look through
the row. So the work for a row grows with the sum, over all rules, of alternatives times places: 100
alternatives "e e" of one rule e are 20,000, and took seconds for a token; 300 took minutes.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from executor_service.grammar.source import GrammarSource, tagged_parts

_OPAQUE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?')
"""Comments, texts and regular expressions, also unclosed ones: so each character is read once."""
_SYMBOL = re.compile(
    r"(?P<defined>[?!]?[a-zA-Z_][\w-]*(?=\s*(?:\.\s*-?\d+\s*)?(?:\[[^\[\]]*\]\s*)?:))|(?P<name>[a-zA-Z_][\w-]*)|\|"
)


class RuleCounts(NamedTuple):
    """Counts of one grammar's rules, or of several grammars' together."""

    alternatives: int  # of all rules
    row_work: int
    """Alternatives times places, summed over the rules."""


def count_rules(lark: str) -> RuleCounts:
    """The counts of a grammar; too much rather than too little: groups' alternatives count as the rule's."""
    alternatives: Counter[str] = Counter()
    places: Counter[str] = Counter()
    rule = ""
    for found in _SYMBOL.finditer(_OPAQUE.sub(" ", lark)):
        match found.lastgroup:
            case "defined":
                rule = found.group().lstrip("?!")
                alternatives[rule] += 1
            case "name":
                places[found.group()] += 1
            case _:
                alternatives[rule] += 1
    rules = {name: count for name, count in alternatives.items() if name.lstrip("_")[:1].islower()}
    return RuleCounts(sum(rules.values()), sum(count * places[name] for name, count in rules.items()))


def rules_of(source: GrammarSource) -> RuleCounts | None:
    """The counts of what is Lark in a grammar; None: nothing is."""
    match source.kind:
        case "lark":
            larks = [source.text]
        case "structural_tag":
            larks = [part.grammar for part in tagged_parts(source.text) if isinstance(part.grammar, str)]
        case _:
            larks = []
    counts = [count_rules(lark) for lark in larks]
    return (
        RuleCounts(sum(c.alternatives for c in counts), sum(c.row_work for c in counts)) if counts else None
    )
