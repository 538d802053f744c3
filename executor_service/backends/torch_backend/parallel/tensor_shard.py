"""`TensorShard`: the `Shard` of one rank among several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from executor_service.adapters.weights import PARENTS
from executor_service.backends.base import ForwardRow, ModelError, RowOutput
from executor_service.backends.torch_backend.files.weights import Checkpoint
from executor_service.backends.torch_backend.ops import sampler
from executor_service.backends.torch_backend.ops.kernels import Kernels, Linear
from executor_service.backends.torch_backend.parallel.cut import Cut, CutCheckpoint
from executor_service.backends.torch_backend.parallel.group import Group


class TensorShard:
    """Implements `Shard` over a group."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.timeout_s: float | None = group.timeout_s
        self._group = group
        self._cut: Cut

    @contextmanager
    def loading(self) -> Iterator[None]:
        """As `Shard.loading`. A rank that fails reports its error, because the others wait for its report."""
        try:
            yield
        except ModelError as error:
            self._group.exchange(str(error))
            raise
        for rank, fault in enumerate(self._group.exchange("")):
            if fault:
                raise ModelError(f"rank {rank}: {fault}")

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        self._cut = Cut(checkpoint.spec, self.rank, self._group.ranks)
        return CutCheckpoint(checkpoint, self._cut)

    def cut_factors(
        self, layer: int, name: str, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Shard.cut_factors`: b is cut as the weight's outputs are, and a as its inputs."""
        part = self._cut.part(f"model.layers.{layer}.{PARENTS[name]}.{name}.weight")
        outputs, *inputs = part or (slice(None),)
        return a[:, inputs[0]] if inputs else a, b[outputs]

    def summed(self, kernels: Kernels, linear: Linear) -> Linear:
        return SummedLinear(kernels, linear, self)

    def sum(self, kernels: Kernels, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """As `Shard.sum`, in the order of the ranks.

        Not an all-reduce, whose order of additions depends on the element's position in the buffer: a row's
        result would depend on the other rows.
        """
        return kernels.sum_parts(self._group.gather(x), add_to)

    def rms_norm(self, kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As `Shard.rms_norm`. Where ranks have copies of parts, there are as many of each part."""
        wide = x.float()
        mean = self.sum(kernels, wide.pow(2).mean(-1, keepdim=True)) / self._group.ranks
        return (weight * (wide * torch.rsqrt(mean + eps))).to(x.dtype)

    def embed(
        self, kernels: Kernels, lookup: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor
    ) -> torch.Tensor:
        """As `Shard.embed`. Exact: one rank has a token's embedding, and the others add zeros to it."""
        ids = self._cut.vocabulary
        here = (tokens >= ids.start) & (tokens < ids.stop)
        x = lookup(torch.where(here, tokens - ids.start, 0))
        return self.sum(kernels, torch.where(here[:, None], x, 0))

    def whole_vocabulary(self, part: int) -> int:
        return self._cut.spec.vocab_size

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        parts = self._group.gather_on_leader(self._widest(logits))
        return logits if parts is None else self._joined(parts)

    def shared_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return self._joined(self._group.gather(self._widest(logits)))

    def share(self, *vectors: torch.Tensor) -> None:
        together = torch.stack(vectors)
        self._group.share(together)
        for vector, shared in zip(vectors, together, strict=True):
            vector.copy_(shared)

    def answer(
        self, logits: torch.Tensor, rows: Sequence[ForwardRow], pick: sampler.Picker
    ) -> list[RowOutput]:
        """As `Shard.answer`. Ranks exchange 8 bytes per position for greedy rows, and logits for others."""
        greedy = np.repeat([sampler.is_greedy(row) for row in rows], [row.outputs for row in rows])
        best = iter(self._best(_where(logits, greedy), pick)) if greedy.any() else iter(())
        if not greedy.all():
            logits = self.whole_logits(_where(logits, ~greedy))
        if self.rank > 0:
            return []
        drawn = [row for row in rows if not sampler.is_greedy(row)]
        sampled = iter(sampler.sample(logits, drawn, pick)) if drawn else iter(())
        return [_taken(best, row.outputs) if sampler.is_greedy(row) else next(sampled) for row in rows]

    def _widest(self, logits: torch.Tensor) -> torch.Tensor:
        """A rank's columns of the logits, padded to as many as any rank has."""
        missing = -(-self._cut.spec.vocab_size // self._group.ranks) - logits.shape[1]
        return functional.pad(logits, (0, missing)) if missing else logits

    def _joined(self, parts: torch.Tensor) -> torch.Tensor:
        """[ranks, rows, columns] of all ranks, as [rows, vocabulary]."""
        vocabulary, ranks = self._cut.spec.vocab_size, self._group.ranks
        sizes = [(r + 1) * vocabulary // ranks - r * vocabulary // ranks for r in range(ranks)]
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def _best(self, logits: torch.Tensor, pick: sampler.Picker) -> list[int]:
        """The lowest id among the largest logits of all ranks for each row; -1: a logit is not finite."""
        ids = pick.argmax(logits)
        values = logits.gather(-1, ids[:, None])[:, 0]
        values = torch.where(sampler.finite_rows(logits), values, torch.nan)
        pair = [values.view(torch.int32), (ids + self._cut.vocabulary.start).to(torch.int32)]
        pairs = self._group.gather(torch.stack(pair, -1))  # [ranks, rows, 2]
        values, ids = pairs[..., 0].contiguous().view(torch.float32), pairs[..., 1]
        top, best = values[0], ids[0]
        for value, number in zip(values[1:], ids[1:], strict=True):
            larger = value > top  # of equal values the first is kept: lower ranks have lower ids
            top, best = torch.where(larger, value, top), torch.where(larger, number, best)
        found: list[int] = torch.where(values.isnan().any(0), -1, best).tolist()
        return found


class SummedLinear:
    """A `Linear` whose inputs are split among the ranks: its results are summed over them."""

    def __init__(self, kernels: Kernels, linear: Linear, shard: TensorShard) -> None:
        self._kernels, self._linear, self._shard = kernels, linear, shard

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: Any = None
    ) -> torch.Tensor:
        return self._shard.sum(self._kernels, self._linear(x, change=change), add_to)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """As `Linear.rows`, of this rank's part: rows of weights need no sum."""
        return self._linear.rows(ids)

    def bytes(self) -> int:
        return self._linear.bytes()


def _where(logits: torch.Tensor, mask: np.ndarray) -> torch.Tensor:
    return logits if mask.all() else logits[torch.from_numpy(mask.nonzero()[0]).to(logits.device)]


def _taken(best: Iterator[int], outputs: int) -> RowOutput:
    ids = [next(best) for _ in range(outputs)]
    if outputs == 0:
        return RowOutput()
    return RowOutput(finite=False) if min(ids) < 0 else RowOutput(tokens=np.array(ids, np.int32))
