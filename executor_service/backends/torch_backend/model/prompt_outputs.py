"""What a step's rows return of their prompts (`PromptOutputs`), from the hidden states of their positions.

Scores need the logits of many positions. They are computed for all rows together, a slice at a time, so that
few of them exist at once and short prompts share the reading of the output layer's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.base import HIDDEN_UNIT, ForwardRow, PromptOutputs, RowOutput
from executor_service.backends.prompt_outputs import scored_states, slices, states_of
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.shard import Shard
from executor_service.backends.torch_backend.ops import sampler
from executor_service.contract.plan import TokenScores


def output_states(rows: Sequence[ForwardRow]) -> NDArray[np.int64] | None:
    """Which of the hidden states of all rows' `states_of` are those of output positions; None: all are."""
    if all(row.prompt is None for row in rows):
        return None
    ends = np.cumsum([states_of(row) for row in rows])
    return np.concatenate([np.arange(end - row.outputs, end) for row, end in zip(rows, ends, strict=True)])


def prompt_outputs(
    model: Model, shard: Shard, rows: Sequence[ForwardRow], hidden: torch.Tensor
) -> dict[int, RowOutput]:
    """What the rows' `prompt`s ask for, by the rows' indices; empty on ranks above 0, which only compute.

    hidden [states, hidden]: of the last `states_of` positions of each row.
    """
    ends = np.cumsum([states_of(row) for row in rows]).tolist()
    mine = {i: slice(end - states_of(rows[i]), end) for i, end in enumerate(ends) if rows[i].prompt}
    scored = [i for i in mine if len(_prompt(rows[i]).targets)]
    places = [np.arange(mine[i].start, mine[i].stop)[scored_states(rows[i])] for i in scored]
    scores: list[TokenScores | None] = []
    if scored:
        place = torch.from_numpy(np.concatenate(places)).to(hidden.device)
        scores = _scores(model, shard, [rows[i] for i in scored], hidden[place])
    if shard.rank > 0:
        return {}
    outputs = {i: _states(model, _prompt(rows[i]), hidden[mine[i]]) for i in mine}
    for i, found in zip(scored, scores, strict=True):
        outputs[i].scores = found
        outputs[i].finite &= found is not None
    return outputs


def joined(output: RowOutput, prompt: RowOutput) -> RowOutput:
    """A row's output and what its prompt gave."""
    if not (output.finite and prompt.finite):
        return RowOutput(finite=False)
    return replace(output, scores=prompt.scores, hidden=prompt.hidden, hidden_sum=prompt.hidden_sum)


def _prompt(row: ForwardRow) -> PromptOutputs:
    assert row.prompt is not None
    return row.prompt


def _states(model: Model, prompt: PromptOutputs, hidden: torch.Tensor) -> RowOutput:
    """The vectors that a row asks for, of its hidden states [states, hidden]."""
    output = RowOutput()
    if prompt.last:
        vectors = model.vectors(hidden[-1:])
        output.hidden = vectors[0].cpu().numpy().copy()  # not a view that keeps all states
        output.finite &= bool(np.isfinite(output.hidden).all())
    if prompt.total:
        # Exact, hence the same in any order: see HIDDEN_UNIT.
        units = model.vectors(hidden).double() / HIDDEN_UNIT
        output.hidden_sum = units.round().sum(0).mul(HIDDEN_UNIT).cpu().numpy()
        output.finite &= bool(np.isfinite(output.hidden_sum).all())
    return output


def _scores(
    model: Model, shard: Shard, rows: Sequence[ForwardRow], hidden: torch.Tensor
) -> list[TokenScores | None]:
    """The scores of the rows' targets; None: not finite. hidden [targets, hidden]: of what is before each."""
    prompts = [_prompt(row) for row in rows]
    counts = [len(prompt.targets) for prompt in prompts]
    target = torch.from_numpy(np.concatenate([prompt.targets for prompt in prompts]).astype(np.int64))
    target = target.to(hidden.device)[:, None]
    vocab_size = shard.whole_vocabulary(model.spec.vocab_size)
    wanted = [min(row.sampling.logprobs or 0, vocab_size) for row in rows]
    alternatives, total, width = np.repeat(wanted, counts), sum(counts), max(wanted)
    finite, logprobs = np.zeros(total, np.bool_), np.zeros(total, np.float32)
    top_ids, top_logprobs = np.zeros((total, width), np.int32), np.zeros((total, width), np.float32)
    for part in slices(total, vocab_size):
        logits = shard.whole_logits(model.logits(hidden[part]))
        if shard.rank > 0:
            continue
        finite[part] = sampler.finite_rows(logits).cpu().numpy()
        norms = model.kernels.log_sum_exp(logits)
        logprobs[part] = (logits.gather(-1, target[part])[:, 0] - norms).cpu().numpy()
        if some := np.flatnonzero(alternatives[part]).tolist():
            values, ids = sampler.ranked(sampler.part_of(logits, some), width)
            at = part.start + np.array(some)
            top_ids[at] = ids.cpu().numpy()
            top_logprobs[at] = (values - norms[some][:, None]).cpu().numpy()
    scores: list[TokenScores | None] = []
    end = 0
    for prompt, count, k in zip(prompts, counts, wanted, strict=True):
        mine = slice(end, end := end + count)
        found = TokenScores(prompt.first, logprobs[mine], top_ids[mine, :k], top_logprobs[mine, :k])
        scores.append(found if finite[mine].all() else None)
    return scores
