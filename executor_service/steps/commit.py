"""`StepCommit`: makes the results of a step's forward the state of its rows' sequences."""

from __future__ import annotations

import numpy as np

from executor_service.backends.acceptance import accepted_drafts
from executor_service.backends.forward_rows import ForwardOutputs, RowOutput
from executor_service.cache.sequence import CachedSequence
from executor_service.cache.sequence_store import SequenceStore
from executor_service.contract.plan import OutputMode, Reason, Refusal, RowResult, TokenScores
from executor_service.steps.accepted_row import AcceptedRow
from executor_service.steps.counters import StepTally
from executor_service.steps.forwards import checked
from executor_service.steps.masking import forced_behind
from executor_service.steps.step_rows import StepRows, undo_row

_SAMPLE = OutputMode.SAMPLE
_NOT_FINITE = Refusal(Reason.NOT_FINITE, "the logits were NaN or infinite")
_PER_POSITION = ("logprobs", "top_ids", "top_logprobs", "logits")


class StepCommit:
    """The commit of one step's rows. A row that is not finite is undone alone, without its neighbours."""

    def __init__(self, rows: StepRows, store: SequenceStore, following: StepRows | None = None) -> None:
        """`following`: the rows of the next step, if one is in flight."""
        self._rows, self._store, self._pages, self._following = rows, store, store.pages, following
        self._computed = self._sampled = self._verified = self._accepted = 0
        self._prefill_rows = self._decode_rows = 0
        self.undone: list[tuple[AcceptedRow, Refusal]] = []
        self.constrained: list[CachedSequence] = []  # that have a grammar and sampled
        # Undoing a row also frees the pages that the next step reserved for the same sequence, and so does
        # rejecting its drafts. This counts those; it is negative where an op of the next step had released
        # the row's own pages before, or where that step keeps some of them.
        self.freed_behind = 0

    @property
    def tally(self) -> StepTally:
        """The counts of what the committed rows computed."""
        return StepTally(
            self._computed,
            self._sampled,
            self._verified,
            self._accepted,
            self._prefill_rows,
            self._decode_rows,
        )

    def take(self, outputs: ForwardOutputs) -> None:
        """Commit or undo every accepted row; `rows.results` is complete afterwards."""
        rows, mispredicted, decodes = self._rows.accepted, self._rows.mispredicted, len(self._rows.decodes)
        checked(outputs, decodes + len(rows))
        for row in reversed(rows):
            if not row.opened:
                break
            self._pages.count_hit(row.known, row.hit)
        if decodes:
            self._absorb_decodes(outputs)
        for row, output in zip(rows, outputs.others.values(), strict=True):
            if not mispredicted or row.sequence not in mispredicted:
                self._absorb(row, output)

    def _absorb_decodes(self, outputs: ForwardOutputs) -> None:
        """Commit the rows that only decode; undo those whose output is not finite."""
        decodes, results, page_size = self._rows.decodes, self._rows.results, self._pages.page_size
        tokens, not_finite = outputs.tokens, outputs.not_finite
        mispredicted = self._rows.mispredicted
        done = 0
        columns = zip(decodes.indices, decodes.sequences, decodes.starts, tokens, strict=True)
        for place, (index, sequence, start, token) in enumerate(columns):
            if mispredicted and sequence in mispredicted:
                continue
            if not_finite and place in not_finite:
                self._undo(decodes.accepted_row(place), not_finite[place] or _NOT_FINITE)
                continue
            end = start + 1
            sequence.ids[end] = token
            sequence.length, sequence.known = end, end + 1
            # A table without pages was released by an op of the next step.
            if end % page_size == 0 and sequence.table.count:
                self._pages.publish(sequence.table, sequence.ids, end)
            results.kv_lengths[index], results.tokens[index] = end, (token,)
            done += 1
        self._computed += done
        self._sampled += done
        self._decode_rows += done

    def _absorb(self, row: AcceptedRow, output: RowOutput) -> None:
        """Commit one row with the output of its last forward; undo it if that is not finite."""
        sequence = row.sequence
        if not output.finite:
            self._undo(row, output.refusal or _NOT_FINITE)
            return
        end = row.start + row.fed
        self._computed += row.computed + row.fed
        if (adapter := sequence.adapter) is not None:
            adapter.rows += 1
            adapter.tokens += row.computed + row.fed
        if row.output is not _SAMPLE or not row.outputs:
            sequence.sampled = False
            self._finish(row, end, max(row.known, end), output)
            return
        tokens = output.tokens
        if tokens is None or len(tokens) != row.outputs:
            given = 0 if tokens is None else len(tokens)
            raise RuntimeError(f"the backend gave {given} tokens for {row.outputs} output positions")
        drafts = len(row.drafts)
        if drafts:
            accepted = accepted_drafts(row.drafts, tokens)
            self._verified += drafts
            self._accepted += accepted
            end -= drafts - accepted
            emitted = tokens[: accepted + 1].tolist()
            _keep(output, accepted + 1)
        else:
            emitted = tokens.tolist()
        row.tokens += emitted
        sequence.ids[end] = emitted[-1]
        if row.parts:
            output = _joined([*row.parts, output])
        self._sampled += len(row.tokens)
        sequence.sampled = True
        self._finish(row, end, end + 1, output)

    def _finish(self, row: AcceptedRow, length: int, known: int, output: RowOutput) -> None:
        """Set the row's sequence to `length` cached and `known` known tokens, and make the row's result."""
        sequence, pages = row.sequence, self._pages
        table = sequence.table
        if row.in_prompt:
            self._prefill_rows += 1
        else:
            self._decode_rows += 1
        sequence.length, sequence.known = length, known
        finite = length if row.outputs else row.finite_length(length)
        # Pages are published only after an output that is finite, since it attended to all of them. The pages
        # of a chunk without outputs are published with the first row that has some. A table without pages was
        # released by an op of the next step.
        if finite // pages.page_size > len(table.hashes) and table.count:
            pages.publish(table, sequence.ids, finite)
        if length < row.end:
            self._give_back(row, length)
        self._rows.results[row.index] = result = RowResult(
            length, row.hit, row.tokens, output.logprobs, output.top_ids, output.top_logprobs, output.logits
        )
        if row.with_prompt:
            row.keep(output)
            _add_prompt_outputs(row, output, result)
        if sequence.automaton is not None and row.tokens:
            self.constrained.append(sequence)
            result.forced = forced_behind(sequence, self._store.limits.max_drafts)

    def _give_back(self, row: AcceptedRow, length: int) -> None:
        """Release the pages reserved for drafts that were rejected, or for steps that were not taken.

        A row in flight after it, which was reserved as if all drafts were accepted, starts at `length`.
        """
        pages, table = self._pages, row.sequence.table
        follower = None if self._following is None else self._following.row_of(row.sequence)
        kept, count = length, table.count
        if follower is not None:
            follower.begin_at(length)
            kept = follower.end
        pages.cut(table, kept)
        self.freed_behind += count - table.count - (pages.pages_for(row.end) - pages.pages_for(length))

    def _undo(self, row: AcceptedRow, refusal: Refusal) -> None:
        """Undo a row that has no finite logits. It counts as refused: how much of it was computed depends on
        how its step was cut into forwards."""
        length, pages_for = row.sequence.length, self._pages.pages_for
        kept = 0 if row.opened else pages_for(length)
        self.freed_behind += max(kept, row.sequence.table.count) - pages_for(row.end)
        undo_row(row, length, self._rows.session, self._store)
        self.undone.append((row, refusal))
        self._rows.results[row.index] = RowResult(refusal=refusal)


def _add_prompt_outputs(row: AcceptedRow, output: RowOutput, result: RowResult) -> None:
    """Set the scores and the vector of a row's result, and add its hidden states to its sequence's sum."""
    sequence = row.sequence
    if row.scores:
        result.scores = TokenScores(
            row.scores[0].first,
            np.concatenate([scores.logprobs for scores in row.scores]),
            np.concatenate([scores.top_ids for scores in row.scores]),
            np.concatenate([scores.top_logprobs for scores in row.scores]),
        )
    result.hidden = output.hidden
    if row.hidden_sum is not None and sequence.hidden_sum is not None:
        total = sequence.hidden_sum + row.hidden_sum
        is_complete = sequence.length >= row.known
        sequence.hidden_sum = None if is_complete else total
        if is_complete and row.output is OutputMode.HIDDEN:
            result.hidden = (total / sequence.length).astype(np.float32)


def _keep(output: RowOutput, count: int) -> None:
    """Drop all but the first `count` output positions."""
    for name in _PER_POSITION:
        array = getattr(output, name)
        if array is not None:
            setattr(output, name, array[:count])


def _joined(parts: list[RowOutput]) -> RowOutput:
    """The outputs of several forwards of one row, one after another."""
    joined = RowOutput()
    for name in _PER_POSITION:
        if getattr(parts[0], name) is not None:
            setattr(joined, name, np.concatenate([getattr(part, name) for part in parts]))
    return joined
