"""`LatePicks`: what the rows of a launched step want beyond the tokens that its launch picks.

That is what `LatePlan` names: tokens of rows with masks, penalties, biases or masked stop ids, which are
picked again from the step's residual; and logprobs and logits, which the host reads with the answer. All of
it is enqueued after the step. The host waits for nothing, and the number of launches does not depend on
the number of rows (up to LOGITS_ROWS positions, whose logits exist at a time).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.layout.host_buffers import Parts, download, upload
from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep, RankMessage
from executor_service.backends.torch_backend.cuda.layout.resolve import TokenPages
from executor_service.backends.torch_backend.cuda.layout.row_ends import RowEnds, accept_launch
from executor_service.backends.torch_backend.cuda.layout.step_buffer import Picked, PickRows
from executor_service.backends.torch_backend.cuda.picking.exclude import exclude_launch
from executor_service.backends.torch_backend.cuda.picking.late_answers import LateAnswers
from executor_service.backends.torch_backend.cuda.picking.late_parts import LateParts, histories, stops
from executor_service.backends.torch_backend.cuda.picking.late_plan import LatePlan, masked_outputs, plan_late
from executor_service.backends.torch_backend.cuda.picking.listed_tokens import (
    Biases,
    bias_launch,
    stop_launches,
)
from executor_service.backends.torch_backend.cuda.picking.logprobs import ChosenTokens, Measures, measure
from executor_service.backends.torch_backend.cuda.picking.penalties import penalty_launches
from executor_service.backends.torch_backend.cuda.picking.pick import pick
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.runner import Numbers, Tell, tell_nobody
from executor_service.backends.torch_backend.model.shard import Shard
from executor_service.backends.torch_backend.ops.row_tensors import LOGITS_ROWS


class LatePicks:
    """Enqueues it; call it from the runner's thread, after the launch and before the next one."""

    def __init__(
        self, model: Model, history: TokenPages, ends: RowEnds, shard: Shard, tell: Tell = tell_nobody
    ) -> None:
        """`ends`: of the last step's rows."""
        self._model, self._history, self._ends = model, history, ends
        self._shard, self._tell = shard, tell
        self._device = model.kernels.device

    def enqueue(
        self,
        rows: ForwardRows,
        indices: Sequence[int],
        picked: Picked,
        step: HostStep,
        *,
        prompts: bool,
    ) -> LateAnswers | None:
        """Enqueue it for some rows, and for the targets of all rows' prompts (`prompts`); None: nothing.

        The tokens that are picked again are then in `picked`, and their rows end where these say.
        """
        plan = plan_late(rows, indices, prompts=prompts)
        if plan is None:
            return None
        answers = LateAnswers(rows, plan)
        with torch.inference_mode():
            for first in range(0, len(plan), LOGITS_ROWS):
                part = range(first, min(first + LOGITS_ROWS, len(plan)))
                self._enqueue_part(rows, plan, part, picked, step, answers)
        return answers

    def repeat(self, numbers: Numbers, picked: Picked) -> None:
        """On a rank above 0: have a part in logits that rank 0 needs, and learn which tokens it picked.

        numbers: of the rows whose ends follow, or 0; then the indices of the tokens whose logits are needed.
        picked: of the last step.
        """
        sent = upload({"tokens": numbers[1:]}, self._device)
        self._logits(picked, sent["tokens"])
        if numbers[0]:
            self._share_ends(int(numbers[0]))

    def _logits(self, picked: Picked, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.shared_logits(self._model.final(picked.residual[tokens]))

    def _share_ends(self, rows: int) -> None:
        self._shard.share(self._ends.tokens[:rows], self._ends.lengths[:rows])

    def _enqueue_part(
        self,
        rows: Sequence[ForwardRow],
        plan: LatePlan,
        part: range,
        picked: Picked,
        step: HostStep,
        answers: LateAnswers,
    ) -> None:
        """Enqueue it for the positions `part` of the plan, whose logits are computed together."""
        here = slice(part.start, part.stop)
        again, measured, copied = (
            _within(some, part) for some in (range(plan.again), plan.measured, plan.copied)
        )
        parts: Parts = {
            "tokens": plan.tokens[here], "outputs": plan.outputs[here], "known": plan.known[here],
        }  # fmt: skip
        late = None
        if again.stop:
            late = LateParts(rows, plan, slice(part.start, part.start + again.stop), self._history.page_size)
            parts = {**parts, **late.parts, **step.pick_parts(plan.outputs[here][again])}
        is_last = part.start < plan.again <= part.stop  # whose tokens are picked again
        if is_last:
            parts = {**parts, **_ends_of(rows, plan)}
        ending = len(rows) if is_last else 0
        self._tell(
            lambda: np.concatenate([np.array([RankMessage.LATE, ending], np.int32), plan.tokens[here]])
        )
        sent = upload(parts, self._device)
        logits = self._logits(picked, sent["tokens"])
        tokens, outputs, resolved = picked.picks[0], sent["outputs"], picked.resolved
        if late is not None:
            # Measures are of the raw logits.
            adjusted = logits[again].clone() if measured.start < again.stop else logits[again]
            self._adjust(adjusted, late, sent, resolved.positions[sent["tokens"][again]] + 1)
            found = torch.empty(2, again.stop, dtype=torch.int32, device=self._device)
            keys = resolved.key_lows[outputs[again]], resolved.key_highs[outputs[again]]
            rules = PickRows(sent["temperatures"], *keys, sent["top_ks"], sent["top_ps"], sent["min_ps"])
            pick(adjusted, rules, found[0], found[1])  # that all logits are finite was seen in the raw ones
            publish_launch(tokens, found[0], outputs[again]).run()
        if is_last:
            accept_launch(
                self._ends, tokens, resolved.tokens, resolved.positions, picked.outputs,
                sent["firsts"], sent["lasts"], sent["targets"],
            ).run()  # fmt: skip
            self._share_ends(ending)
        if measured.start < measured.stop:
            chosen = ChosenTokens(sent["known"][measured], outputs[measured], tokens)
            k = min(plan.alternatives, logits.shape[1])
            measures = Measures.empty(measured.stop - measured.start, k, self._device)
            measure(logits[measured], chosen, measures)
            answers.measures.append(download(measures.packed))
        if copied.start < copied.stop:
            answers.logits.append(download(logits[copied]))

    def _adjust(
        self, logits: torch.Tensor, late: LateParts, sent: dict[str, torch.Tensor], lengths: torch.Tensor
    ) -> None:
        """Apply masks, penalties, biases and masks of stop ids to logits, in place.

        lengths [positions]: of their histories, in tokens.
        """
        if late.masked:
            words = sent["words"].view(-1, -(-logits.shape[1] // 32))
            exclude_launch(logits, words, sent["mask_places"]).run()
        if late.penalized:
            counts = torch.zeros(logits.shape, dtype=torch.int32, device=self._device)
            for launch in penalty_launches(logits, self._history.ids, histories(sent, lengths), counts):
                launch.run()
        if late.biased:
            bias_launch(logits, Biases(*(sent[name] for name in Biases.__slots__))).run()
        if late.max_stops:
            kept = torch.empty(len(logits), late.max_stops, device=self._device)
            for launch in stop_launches(logits, stops(sent, lengths), kept):
                launch.run()


def _ends_of(rows: Sequence[ForwardRow], plan: LatePlan) -> Parts:
    """The rows that are picked again: their first outputs, the last ones that they have, their indices."""
    spans = plan.spans_again
    firsts = np.array([span.first_output for span in spans], np.int32)
    outputs = np.array([masked_outputs(rows[span.row]) for span in spans], np.int32)
    targets = np.array([span.row for span in spans], np.int32)
    return {"firsts": firsts, "lasts": firsts + outputs - 1, "targets": targets}


def _within(positions: range, part: range) -> slice:
    """Which of the positions of `part` are among `positions`, counted from the first of `part`."""
    begin, end = max(positions.start, part.start), min(positions.stop, part.stop)
    return slice(begin - part.start, max(end, begin) - part.start)


_TILE = 256  # tokens of a program


@triton.jit(do_not_specialize=("picks", "found", "outputs", "count"))
def _publish_kernel(picks, found, outputs, count, tile: tl.constexpr):
    """Program (tile of tokens): store each token."""
    begin_kernel()
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    live = index < count
    token = tl.load(found + index, mask=live, other=0)
    tl.store(picks + tl.load(outputs + index, mask=live, other=0), token, mask=live)


def publish_launch(picks: torch.Tensor, found: torch.Tensor, outputs: torch.Tensor) -> Launch:
    """picks[outputs[i]] = found[i], all int32."""
    return Launch(
        _publish_kernel,
        (-(-len(found) // _TILE), 1, 1),
        {"picks": picks, "found": found, "outputs": outputs, "count": len(found)},
        {"tile": _TILE},
        warps=4,
        stages=1,
    )
