"""`LatePicks`: the tokens of a step that its launch could not pick.

Those are the tokens of masked rows, picked once more from the step's hidden states, and of rows with
penalties, biases or logprobs, which `sampler` picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.torch_backend import sampler
from executor_service.backends.torch_backend.batch import parts
from executor_service.backends.torch_backend.cuda.exclude import exclude_launch
from executor_service.backends.torch_backend.cuda.graphs import Picked
from executor_service.backends.torch_backend.cuda.pick import pick
from executor_service.backends.torch_backend.cuda.step_buffer import StepBuffer
from executor_service.backends.torch_backend.model import Model


class LatePicks:
    """Picks tokens from the hidden states of launched steps; call it from the runner's thread."""

    def __init__(self, model: Model, sampled: torch.Tensor) -> None:
        """`sampled`: the token that each row of the last step sampled last, int32 on the device."""
        self._model, self._sampled = model, sampled
        self._device = model.kernels.device

    def pick(
        self,
        rows: Sequence[ForwardRow],
        indices: Sequence[int],
        picked: Picked,
        step: Callable[[], StepBuffer],
    ) -> dict[int, RowOutput]:
        """Pick the tokens of some rows that a launch could not, before the next launch.

        Masked rows get theirs on the device; returned are the outputs of those that the sampler picks.
        """
        with torch.inference_mode():
            special = [i for i in indices if rows[i].outputs and not sampler.is_plain(rows[i])]
            masked = [i for i in indices if rows[i].masks is not None and sampler.is_plain(rows[i])]
            if masked:
                self._pick_masked(rows, masked, picked, step())
            return self._by_sampler(rows, special, picked.hidden)

    def _pick_masked(
        self, rows: Sequence[ForwardRow], masked: list[int], picked: Picked, step: StepBuffer
    ) -> None:
        """Pick the tokens of masked rows; enqueued, with nothing read back."""
        places, last = _places(rows, masked), np.cumsum([rows[i].outputs for i in masked]) - 1
        masks = np.concatenate([rows[i].masks for i in masked])
        words = np.ascontiguousarray(masks).view(np.int32)
        numbers = np.concatenate([words.ravel(), places, last, masked]).astype(np.int32)
        host = torch.empty(len(numbers), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        host.numpy()[:] = numbers
        sizes = [words.size, len(places), len(last), len(masked)]
        bits, at, ends, targets = torch.split(host.to(self._device, non_blocking=True), sizes)
        at = at.long()
        logits = self._model.logits(picked.hidden[at])
        exclude_launch(logits, bits.view(words.shape)).run()
        found = torch.empty(2, len(places), dtype=torch.int32, device=self._device)
        pick(logits, step.pick(at), found[0], found[1])
        picked.picks[0, at] = found[0]  # whether they are finite was seen in the raw logits
        self._sampled[targets.long()] = found[0][ends.long()]

    def _by_sampler(
        self, rows: Sequence[ForwardRow], special: list[int], hidden: torch.Tensor
    ) -> dict[int, RowOutput]:
        """The outputs of the rows that need more than `pick` gives, by their indices in the step."""
        answered: dict[int, RowOutput] = {}
        for part in parts([rows[index] for index in special]):
            mine = special[len(answered) : len(answered) + len(part)]
            places = torch.from_numpy(_places(rows, mine)).to(self._device)
            logits = self._model.logits(hidden[places])
            answered |= zip(mine, sampler.sample(logits, part, self._model.kernels), strict=True)
        for index, output in answered.items():
            if output.finite and output.tokens is not None:
                self._sampled[index] = int(output.tokens[-1])
        return answered


def _places(rows: Sequence[ForwardRow], indices: Sequence[int]) -> NDArray[np.int64]:
    """Where the outputs of some rows are among those of all rows."""
    ends = np.cumsum([row.outputs for row in rows]).tolist()
    return np.concatenate([np.arange(ends[i] - rows[i].outputs, ends[i]) for i in indices])
