"""Three steps of which each continues rows of the one before, which is not read: what they should give."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from executor_service.backends.acceptance import mask_late, resolved
from executor_service.backends.base import ForwardRow, PendingForward, RowOutput
from executor_service.backends.forward_rows import ForwardRows
from executor_service.contract.masks import Masks
from executor_service.contract.plan import Sampling
from tests.support.untyped import present
from tests.triton.interpreted.device_rows import DRAWN, masked, row, same


class Launching(Protocol):
    """A runner or a backend."""

    def launch(self, rows: ForwardRows) -> PendingForward: ...


SAMPLINGS = [
    DRAWN,
    Sampling(),
    replace(DRAWN, logprobs=2),
    Sampling(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.2),
    # Token 5 is drawn as soon as it may be.
    Sampling(logit_bias=((5, 90.0), (9, 80.0)), stop_token_ids=(5,), min_tokens=4, logprobs=1),
    replace(DRAWN, repetition_penalty=2.0, logit_bias=((7, 5.0),), stop_token_ids=(3, 7), min_tokens=9),
]


def verification(before: ForwardRow, output: RowOutput, drafts: list[int]) -> ForwardRow:
    """The row that continues a computed one with these drafts."""
    return resolved(behind(before, 0, drafts, masked_later=False), before, output)


def behind(before: ForwardRow, follows: int, drafts: list[int], *, masked_later: bool) -> ForwardRow:
    """The row that continues one in flight, as the engine has it."""
    tokens = np.array([-1, *drafts], np.int32)
    return replace(
        before, start=len(before.history), tokens=tokens, history=np.append(before.history, tokens),
        outputs=len(tokens), follows=follows, slack=before.outputs - 1, masked_later=masked_later, masks=None,
    )  # fmt: skip


def check_rows_behind_drafts(ahead: Launching, host: Launching, seed: int, atol: float = 1e-5) -> None:
    """Rows of every sampling, whose drafts are accepted in full, in part or not at all, near page ends.

    Some get masks when both steps are launched, which may be those of fewer drafts. `host`: computes a step
    at a time, on KV storage of its own.
    """
    rng = np.random.default_rng(seed)

    def on_host(rows: list[ForwardRow]) -> list[RowOutput]:
        return list(host.launch(ForwardRows([replace(one, masked_later=False) for one in rows])).outputs())

    def with_drafts(rows: list[ForwardRow], told: list[RowOutput]) -> list[list[int]]:
        """What comes after computed rows, but for some of the last ones."""
        wanted = rng.integers(1, 5, len(rows)).tolist()
        found: list[list[int]] = [[] for _ in rows]
        for _ in range(1 + max(wanted)):
            rows = [verification(one, output, []) for one, output in zip(rows, told, strict=True)]
            told = on_host(rows)
            for mine, output in zip(found, told, strict=True):
                mine.append(int(present(output.tokens)[-1]))
        right = [int(rng.integers(0, count + 1)) for count in wanted]
        return [
            mine[:n] + [(token + 1) % 320 for token in mine[n:count]]
            for mine, n, count in zip(found, right, wanted, strict=True)
        ]

    lengths = rng.integers(11, 19, len(SAMPLINGS)).tolist()
    opened = [
        row(name, 0, length, sampling=sampling)
        for name, length, sampling in zip("abcdef", lengths, SAMPLINGS, strict=True)
    ]
    told = on_host(opened)
    ahead.launch(ForwardRows(opened)).outputs()
    guesses = with_drafts(opened, told)
    first = [verification(*known) for known in zip(opened, told, guesses, strict=True)]
    answers = on_host(first)
    later = rng.integers(0, 2, len(first)).astype(bool)
    guesses = with_drafts(first, answers)
    order = rng.permutation(len(first)).tolist()
    second = [behind(first[i], i, guesses[i], masked_later=bool(later[i])) for i in order]
    masks: dict[int, Masks | None] = {}
    for place, one in enumerate(second):
        if one.masked_later:
            count = int(rng.integers(0, one.outputs + 1))  # fewer than its outputs, or none: any token
            allowed = [range(int(rng.integers(0, 9)), 320) for _ in range(count)]
            masks[place] = masked(one, *allowed).masks if allowed else None
    launched = ahead.launch(ForwardRows(first)), ahead.launch(ForwardRows(second))
    if masks:
        launched[1].constrain(masks)
    known = [resolved(one, first[one.follows], answers[one.follows]) for one in second]
    for place, given in masks.items():
        mask_late(known[place], given)
    third = [behind(one, place, [], masked_later=False) for place, one in enumerate(second)]
    same(launched[0].outputs(), answers, atol)
    last = ahead.launch(ForwardRows(third))
    expected = on_host(known)
    same(launched[1].outputs(), expected, atol)
    final = [resolved(one, known[one.follows], expected[one.follows]) for one in third]
    same(last.outputs(), on_host(final), atol)
