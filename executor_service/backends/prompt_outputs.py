"""What rows return of their prompts (`PromptOutputs`), in numpy: scores, and hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import HIDDEN_UNIT, ForwardRow, RowOutput
from executor_service.backends.numpy_sampler import Logits, log_softmax, most_likely
from executor_service.contract.plan import TokenIds, TokenScores

SLICE_BYTES = 8 << 20
"""Maximum size of the logits that exist at a time while tokens are scored, unless one token's are larger."""

Hidden = NDArray[np.float32] | NDArray[np.float64]
"""Hidden states after the final norm, [tokens, hidden]."""


def states_of(row: ForwardRow) -> int:
    """Of how many of its last positions a row needs the hidden states."""
    prompt = row.prompt
    if prompt is None:
        return row.outputs
    end = row.start + len(row.tokens)
    return max(
        row.outputs,
        end - prompt.first + 1 if len(prompt.targets) else 0,
        len(row.tokens) if prompt.total else int(prompt.last),
    )


def slices(count: int, vocab_size: int) -> Iterator[slice]:
    """Consecutive slices of `count` positions, whose fp32 logits have at most SLICE_BYTES each."""
    step = max(1, SLICE_BYTES // (4 * vocab_size))
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


def scored_states(row: ForwardRow) -> slice:
    """Which of the row's `states_of` last positions give the scores of its targets."""
    assert row.prompt is not None
    prompt = row.prompt
    first = prompt.first - 1 - (row.start + len(row.tokens) - states_of(row))
    return slice(first, first + len(prompt.targets))


def add_prompt_outputs(
    row: ForwardRow,
    output: RowOutput,
    hidden: Hidden,
    vocab_size: int,
    logits: Callable[[slice], Logits],
) -> RowOutput:
    """The row's output, and what its `prompt` asks for.

    hidden [states, hidden]: of the last `states_of(row)` positions; `logits` computes those of some of them.
    """
    if row.prompt is None or not output.finite:
        return output
    prompt = row.prompt
    if len(prompt.targets):
        at, targets, k = scored_states(row), prompt.targets, row.sampling.logprobs or 0
        parts = []
        for part in slices(len(targets), vocab_size):
            found = logits(slice(at.start + part.start, at.start + part.stop))
            if not np.isfinite(found).all():
                return RowOutput(finite=False)
            parts.append(score(found, targets[part], k))
        output.scores = TokenScores(
            prompt.first, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        )
    if (prompt.last or prompt.total) and not np.isfinite(hidden).all():
        return RowOutput(finite=False)
    if prompt.last:
        output.hidden = hidden[-1].astype(np.float32)
    if prompt.total:
        output.hidden_sum = hidden_sum(hidden)
    return output


def score(
    logits: Logits, targets: TokenIds, k: int
) -> tuple[NDArray[np.float32], TokenIds, NDArray[np.float32]]:
    """The logprobs of `targets` [n] by finite logits [n, V], and the k best ids and their logprobs [n, k]."""
    logprobs = log_softmax(logits)[np.arange(len(targets)), targets]
    if not k:
        return logprobs, np.zeros((len(targets), 0), np.int32), np.zeros((len(targets), 0), np.float32)
    return logprobs, *most_likely(logits, k)


def hidden_sum(hidden: Hidden) -> NDArray[np.float64]:
    """The sum of hidden states [tokens, hidden], each rounded to a multiple of HIDDEN_UNIT."""
    total: NDArray[np.float64] = np.rint(hidden.astype(np.float64) / HIDDEN_UNIT).sum(axis=0) * HIDDEN_UNIT
    return total
