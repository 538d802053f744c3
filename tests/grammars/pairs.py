"""All pairs: rows of options in which every two values of different options occur together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

Choice = tuple[str, str]  # an option's name and its value


def all_pairs(options: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Greedy: a row begins with a pair that is missing, and takes values that add most."""
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(options, 2)
        for x in options[a]
        for y in options[b]
    }
    rows: list[dict[str, str]] = []
    while missing:
        row = sorted(min(missing, key=sorted))
        taken = {name for name, _ in row}
        for name in options:
            if name not in taken:
                choices = [(name, value) for value in options[name]]
                row.append(max(choices, key=partial(_gain, missing, tuple(row))))
        missing -= {frozenset(pair) for pair in itertools.combinations(row, 2)}
        chosen = dict(row)
        rows.append({name: chosen[name] for name in options})
    return rows


def _gain(missing: set[frozenset[Choice]], row: Sequence[Choice], choice: Choice) -> int:
    """How many missing pairs a choice makes with a row's."""
    return sum(frozenset({choice, one}) in missing for one in row)
