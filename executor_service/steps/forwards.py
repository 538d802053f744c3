"""From accepted rows to forwards: one for all rows, or several for a long step."""

from __future__ import annotations

from collections.abc import Sequence

from executor_service.backends.base import (
    Backend,
    ComputedForward,
    ForwardRow,
    PendingForward,
    PromptOutputs,
    RowOutput,
)
from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows
from executor_service.contract.plan import NO_TOKENS, Abandoned, Forwards, OutputMode
from executor_service.steps.accepted_row import AcceptedRow, scored_by
from executor_service.steps.masking import masks_behind
from executor_service.steps.pieces import cut
from executor_service.steps.step_rows import StepRows

_HIDDEN = OutputMode.HIDDEN


def launch(backend: Backend, rows: StepRows) -> PendingForward:
    """Launch one forward of all rows."""
    table = ForwardRows((_forward_row(row, row.fed) for row in rows.accepted), rows.decodes)
    return backend.launch(table) if table else ComputedForward(ForwardOutputs.of(()))


def compute(
    backend: Backend, rows: list[AcceptedRow], max_tokens: int, *, abandonable: bool
) -> Forwards[ComputedForward]:
    """Compute all rows in several forwards. Raises Abandoned if it may and no client waits any more.

    A forward feeds at most `max_tokens` tokens, unless a single row has more output positions than that.
    Nothing else is in flight. Nothing is committed: tokens that the rows were given or sampled are in their
    sequences' `ids`, beyond the known tokens.
    """
    outputs: dict[AcceptedRow, RowOutput] = {}
    left = rows
    while left:
        if not (yield) and abandonable:
            raise Abandoned
        pieces = cut(left, max_tokens)
        answered = checked(backend.forward([_forward_row(row, count) for row, count in pieces]), len(pieces))
        continuing: dict[AcceptedRow, None] = {}
        for (row, count), output in zip(pieces, answered, strict=True):
            if count < row.fed and output.finite:
                row.keep(output)
                row.start, row.fed = row.start + count, row.fed - count
            elif _continues(row, output):
                continuing[row] = None
            else:
                outputs[row] = output
        # Rows of several steps come first, so that they share forwards with the pieces of the others.
        left = [*continuing, *(row for row in left if row not in outputs and row not in continuing)]
    return ComputedForward(ForwardOutputs.of([outputs[row] for row in rows]))


def checked(outputs: Sequence[RowOutput], rows: int) -> Sequence[RowOutput]:
    """The outputs, after a check that there is one for each row. Raises RuntimeError."""
    if len(outputs) != rows:
        raise RuntimeError(f"the backend gave {len(outputs)} outputs for {rows} rows")
    return outputs


def _forward_row(row: AcceptedRow, count: int) -> ForwardRow:
    """A forward of the row's next `count` tokens. Its outputs are computed with the last of its tokens."""
    sequence, start, is_last = row.sequence, row.start, count == row.fed
    end = start + count
    history = sequence.ids[:end]
    return ForwardRow(
        start,
        history[start:],
        history,
        sequence.prompt_length,
        sequence.table.pages(),
        row.outputs if is_last and row.output is not _HIDDEN else 0,
        row.output,
        sequence.sampling,
        row.top_k,
        sequence.salt,
        row.follows,
        row.masks if is_last else None,
        row.masked_later,
        -1 if sequence.adapter is None else sequence.adapter.slot,
        _prompt_outputs(row, end, is_last=is_last) if row.with_prompt else None,
        row.slack,
    )


def _prompt_outputs(row: AcceptedRow, end: int, *, is_last: bool) -> PromptOutputs | None:
    """What a forward of the row's tokens up to `end` returns of the prompt."""
    sequence = row.sequence
    scored = scored_by(sequence.scored, row.start, end)
    total = sequence.hidden_sum is not None
    last = is_last and row.outputs > 0 and row.output is _HIDDEN and not total
    if not (scored or total or last):
        return None
    targets = sequence.ids[scored.start : scored.stop].copy() if scored else NO_TOKENS
    return PromptOutputs(scored.start, targets, last, total)


def _continues(row: AcceptedRow, output: RowOutput) -> bool:
    """Whether a row of several steps has a step left. If so, let it feed the token that it sampled."""
    if row.left == 1 or not output.finite:
        return False
    assert output.tokens is not None
    (token,) = output.tokens.tolist()
    if token in row.sequence.sampling.stop_token_ids:
        return False
    end = row.start + row.fed
    row.sequence.ids[end] = token
    if row.sequence.automaton is not None:
        masks = masks_behind(row.sequence, end + 1)
        if masks is None:
            return False
        row.masks = masks
    row.tokens.append(token)
    row.parts.append(output)
    row.keep(output)
    row.left -= 1
    row.start, row.fed = end, 1
    return True
