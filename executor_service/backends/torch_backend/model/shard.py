"""`Shard`: one rank's part of a model, and the collectives that combine the ranks' parts.

`Model` and `TorchBackend` always work on a shard; `Whole` is the shard of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.torch_backend.files.weights import Checkpoint
from executor_service.backends.torch_backend.ops import sampler
from executor_service.backends.torch_backend.ops.kernels import Kernels, Linear


class Shard(Protocol):
    """One rank's part. All ranks make the same calls in the same order."""

    rank: int  # rank 0 returns the outputs
    timeout_s: float | None  # how long a rank may keep the others waiting; None: there are no others

    def loading(self) -> AbstractContextManager[None]:
        """A context around loading; raises ModelError at its end if any rank failed to load."""

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        """The part of a checkpoint that this rank holds. Raises ModelError if it can't be split."""

    def cut_factors(
        self, layer: int, name: str, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of an adapter's factors of a linear layer: a [rank, inputs], b [outputs, rank]."""

    def summed(self, kernels: Kernels, linear: Linear) -> Linear:
        """A linear layer whose result is the sum over ranks; each rank has a part of its inputs."""

    def sum(self, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, the same bits on every rank and for every shape."""

    def rms_norm(self, kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`Kernels.rms_norm` of rows of which each rank has a part of the same size."""

    def embed(
        self, kernels: Kernels, lookup: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor
    ) -> torch.Tensor:
        """Embeddings of `tokens` (int64 [tokens]) from all ranks; `lookup` reads this rank's part."""

    def whole_vocabulary(self, part: int) -> int:
        """The size of the vocabulary of which this rank holds `part` ids."""

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """On rank 0: [rows, vocabulary] of all ranks' columns. On other ranks the argument."""

    def shared_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of all ranks' columns, on every rank."""

    def share(self, *vectors: torch.Tensor) -> None:
        """Copy rank 0's vectors, of one size and dtype, to every other rank's, in place."""

    def answer(
        self, logits: torch.Tensor, rows: Sequence[ForwardRow], pick: sampler.Picker
    ) -> list[RowOutput]:
        """On rank 0: `sampler.sample` over all ranks' columns of the logits. On other ranks an empty list."""


class Whole:
    """The shard of a single process: the whole model."""

    rank = 0
    timeout_s: float | None = None

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    def cut_factors(
        self, layer: int, name: str, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return a, b

    def summed(self, kernels: Kernels, linear: Linear) -> Linear:
        return linear

    def sum(self, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
        return x

    def rms_norm(self, kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return kernels.rms_norm(x, weight, eps)

    def embed(
        self, kernels: Kernels, lookup: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor
    ) -> torch.Tensor:
        return lookup(tokens)

    def whole_vocabulary(self, part: int) -> int:
        return part

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def shared_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def share(self, *vectors: torch.Tensor) -> None:
        return

    def answer(
        self, logits: torch.Tensor, rows: Sequence[ForwardRow], pick: sampler.Picker
    ) -> list[RowOutput]:
        return sampler.sample(logits, rows, pick)
