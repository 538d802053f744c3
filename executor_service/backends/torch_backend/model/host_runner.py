"""`HostRunner`: runs steps synchronously, on any device and with any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.base import ComputedForward, PendingForward, Progress
from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows, RowOutput
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.prompt_outputs import joined, output_states, prompt_outputs
from executor_service.backends.torch_backend.model.row_numbers import pack_rows, unpack_rows
from executor_service.backends.torch_backend.model.runner import Numbers, Tell, tell_nobody
from executor_service.backends.torch_backend.model.shard import Shard
from executor_service.backends.torch_backend.model.slot_adapters import SlotAdapters, by_slot
from executor_service.backends.torch_backend.ops.page_format import LayerCache, copy_keys_and_values
from executor_service.backends.torch_backend.ops.row_tensors import Batch, parts


class HostRunner:
    """Computes the steps of one rank's part of a model over its caches."""

    max_pending_forwards = 1

    def __init__(
        self,
        model: Model,
        shard: Shard,
        caches: Sequence[LayerCache],
        page_size: int,
        adapters: SlotAdapters | None = None,
        tell: Tell = tell_nobody,
    ) -> None:
        """`adapters`: in whose slots the rows' adapters are; None: rows have none."""
        self._tell = tell
        self._model, self._shard, self._caches, self._page_size = model, shard, caches, page_size
        self._adapters = adapters

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """Do nothing: CUDA graphs need the `DeviceRunner`."""

    def launch(self, rows: ForwardRows) -> PendingForward:
        self._tell(lambda: pack_rows(rows))
        return self._launch(rows)

    def repeat(self, message: Numbers) -> None:
        self._launch(ForwardRows(unpack_rows(message)))

    def copy_page(self, source: int, target: int) -> None:
        with torch.inference_mode():
            copy_keys_and_values(self._caches, source, target)

    def close(self) -> None:
        """Do nothing: nothing is captured."""

    def _launch(self, rows: ForwardRows) -> PendingForward:
        order = by_slot(rows)
        if order is None:
            results = self._compute(rows, None)
        else:
            results = self._compute(ForwardRows(rows[i] for i in order), self._adapters)
            found = dict(zip(order, results, strict=False))  # ranks above 0 have fewer, which nobody reads
            results = [found[i] for i in sorted(found)]
        return ComputedForward(ForwardOutputs.of(results, rows.decodes))

    def _compute(self, rows: ForwardRows, adapters: SlotAdapters | None) -> list[RowOutput]:
        """The results in the order of the rows, in which those of one slot follow each other."""
        model = self._model
        with torch.inference_mode(), model.kernels.step():
            batch = Batch.of(rows, self._page_size, model.kernels.device)
            changes = None if adapters is None else adapters.changes(rows)
            prepared = model.prepare(batch)
            states = model.hidden(batch.tokens, batch.states, prepared, self._caches, changes)
            places = output_states(rows)
            hidden = states if places is None else states[torch.from_numpy(places).to(states.device)]
            results: list[RowOutput] = []
            begin = 0
            for part in parts(rows):
                end = begin + sum(row.outputs for row in part)
                if end > begin:
                    results += self._shard.answer(model.logits(hidden[begin:end]), part, model.kernels)
                else:
                    results += [RowOutput() for _ in part]
                begin = end
            if places is not None:
                for index, found in prompt_outputs(model, self._shard, rows, states).items():
                    results[index] = joined(results[index], found)
            return results
