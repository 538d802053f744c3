"""Vectors of prompts on the device: the last token's hidden state, and sums of all tokens' hidden states."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from executor_service.backends.base import HIDDEN_UNIT, ForwardRow, RowOutput
from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows
from executor_service.backends.torch_backend.cuda.layout.host_buffers import download, upload
from executor_service.backends.torch_backend.model.model import Model

_TOKENS = 1024  # whose hidden states exist at a time in fp64


class PromptVectors:
    """The vectors of a step's rows, on their way to the host."""

    def __init__(self, model: Model, rows: ForwardRows, residual: torch.Tensor) -> None:
        """Enqueue them. residual [tokens, hidden]: of the step."""
        self._last = [i for i, row in enumerate(rows) if row.prompt is not None and row.prompt.last]
        self._total = [i for i, row in enumerate(rows) if row.prompt is not None and row.prompt.total]
        ends = np.cumsum([len(row.tokens) for row in rows], dtype=np.int32)
        counts = [len(rows[i].tokens) for i in self._total]
        tokens = [np.arange(ends[i] - len(rows[i].tokens), ends[i], dtype=np.int32) for i in self._total]
        parts = {
            "last": ends[self._last] - 1,
            "owners": np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            "tokens": np.concatenate([np.zeros(0, np.int32), *tokens]),
        }
        with torch.inference_mode():
            at = upload(parts, residual.device)
            if self._last:
                self._vectors = download(model.vectors(model.final(residual[at["last"]])))
            if self._total:
                shape = (len(self._total), model.spec.vector_size)
                sums = torch.zeros(shape, dtype=torch.float64, device=residual.device)
                for first in range(0, len(at["tokens"]), _TOKENS):
                    part = slice(first, first + _TOKENS)
                    # Exact, hence the same in any order: see HIDDEN_UNIT.
                    vectors = model.vectors(model.final(residual[at["tokens"][part]]))
                    units = (vectors.double() / HIDDEN_UNIT).round()
                    sums.index_add_(0, at["owners"][part], units)
                self._sums = download(sums * HIDDEN_UNIT)

    def read(self, outputs: ForwardOutputs) -> None:
        """Add them to the step's outputs. Only when the work that the constructor enqueued is done."""
        if self._last:
            for i, vector in zip(self._last, self._vectors.numpy().copy(), strict=True):
                if not np.isfinite(vector).all():
                    outputs.others[i] = RowOutput(finite=False)
                elif outputs.others[i].finite:
                    outputs.others[i].hidden = vector
        if self._total:
            for i, total in zip(self._total, self._sums.numpy().copy(), strict=True):
                if not np.isfinite(total).all():
                    outputs.others[i] = RowOutput(finite=False)
                elif outputs.others[i].finite:
                    outputs.others[i].hidden_sum = total


def wants_vectors(rows: Iterable[ForwardRow]) -> bool:
    """Whether any row asks for a vector."""
    return any(row.prompt is not None and (row.prompt.last or row.prompt.total) for row in rows)
