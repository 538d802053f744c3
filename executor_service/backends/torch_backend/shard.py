"""`Shard`: what one rank holds of a model, and how the ranks' parts become a whole.

The model and the backend are written for a shard; `Whole`, the only rank there is, costs them nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.torch_backend import sampler
from executor_service.backends.torch_backend.kernels import Linear
from executor_service.backends.torch_backend.weights import Checkpoint


class Shard(Protocol):
    """One rank's part. All ranks make the same calls in the same order."""

    rank: int  # 0 answers

    def loading(self) -> AbstractContextManager[None]:
        """Around reading the model: raises ModelError at its end if any rank could not."""

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        """The part of a checkpoint that this rank holds. Raises ModelError if it can't be split."""

    def summed(self, linear: Linear) -> Linear:
        """A linear layer over a part of its inputs, made to give the sum of all ranks' parts."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, the same bits on every rank and for every shape."""

    def embed(self, lookup: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, of which `lookup` knows this rank's part; tokens int64 [tokens]."""

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """On rank 0: [rows, vocabulary] of all ranks' columns. Elsewhere what it was given."""

    def answer(
        self, logits: torch.Tensor, rows: Sequence[ForwardRow], pick: sampler.Picker
    ) -> list[RowOutput]:
        """On rank 0: `sampler.sample` of the logits of which each rank has its columns. Elsewhere nothing."""


class Whole:
    """The shard of a single rank: everything."""

    rank = 0

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    def summed(self, linear: Linear) -> Linear:
        return linear

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def embed(self, lookup: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return lookup(tokens)

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def answer(
        self, logits: torch.Tensor, rows: Sequence[ForwardRow], pick: sampler.Picker
    ) -> list[RowOutput]:
        return sampler.sample(logits, rows, pick)
