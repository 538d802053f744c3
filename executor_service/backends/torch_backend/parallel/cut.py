"""The part of a model that a rank holds: a share of the heads, MLP neurons and ids of the vocabulary.

The layout is Megatron's (Shoeybi et al. 2019). Linear layers that produce heads and MLP neurons are split by
their outputs, those that consume them by their inputs, so that a block needs two sums over the ranks. An
expert is split as an MLP is. Where there are fewer KV heads than ranks, several ranks hold copies of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec, QkNorm
from executor_service.backends.torch_backend.files.scaled_numbers import Weight
from executor_service.backends.torch_backend.files.stored_names import EMBEDDING, HEAD, SHARED_EXPERT, SINKS
from executor_service.backends.torch_backend.files.tensor_shapes import Part
from executor_service.backends.torch_backend.files.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Cut:
    """The share of one rank in a model. Raises ModelError for a model that cannot be split so."""

    spec: ModelSpec  # of the whole
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        s, n = self.spec, self.ranks
        self._divides(s.heads, "heads")
        if s.kv_heads % n and n % s.kv_heads:
            raise ModelError(
                f"--tensor-parallel {n}: {s.kv_heads} KV heads can't be split or copied into equal shares"
            )
        if s.moe is None or len(s.moe.sparse_layers) < s.layers:
            self._divides(s.intermediate_size, "MLP neurons")
        if s.moe is not None:
            self._divides(s.moe.intermediate_size, "neurons of an expert")
            self._divides(s.moe.shared_size, "neurons of the shared expert")
        if s.vocab_size < n:
            raise ModelError(
                f"--tensor-parallel {n}: more ranks than the {s.vocab_size} ids of the vocabulary"
            )

    @property
    def vocabulary(self) -> slice:
        """The ids whose embeddings and logits this rank holds. Shares differ by at most one id."""
        return self._share(self.spec.vocab_size)

    @property
    def local(self) -> ModelSpec:
        """The spec of the share, which is a narrower model."""
        s = self.spec
        moe = s.moe and replace(
            s.moe,
            intermediate_size=max(s.moe.intermediate_size // self.ranks, 1),
            shared_size=s.moe.shared_size // self.ranks,
        )
        ids = self.vocabulary
        return replace(
            s,
            vocab_size=ids.stop - ids.start,
            heads=s.heads // self.ranks,
            kv_heads=max(s.kv_heads // self.ranks, 1),
            intermediate_size=max(s.intermediate_size // self.ranks, 1),
            moe=moe,
        )

    def part(self, name: str) -> Part | None:
        """This rank's part of a tensor, by its Hugging Face name; None: all of it."""
        s = self.spec
        if name in (EMBEDDING, HEAD):
            return (self.vocabulary,)
        *_, layer, kind = name.split(".")
        if name.endswith(SINKS):
            return (self._share(s.heads),)
        together = s.qk_norm is QkNorm.ALL  # its norms are as wide as all heads
        if layer == "q_proj" or (layer == "q_norm" and together):
            return (self._share(s.heads, s.head_dim),)
        if layer in ("k_proj", "v_proj") or (layer == "k_norm" and together):
            return (self._kv_share(),)
        if layer == "o_proj" and kind == "weight":
            return (slice(None), self._share(s.heads, s.head_dim))
        if layer in ("gate_proj", "up_proj"):
            return (self._share(self._neurons(name)),)
        if layer == "down_proj" and kind == "weight":
            return (slice(None), self._share(self._neurons(name)))
        return None

    def _neurons(self, name: str) -> int:
        moe = self.spec.moe
        if moe and SHARED_EXPERT in name:
            return moe.shared_size
        return moe.intermediate_size if moe and ".experts." in name else self.spec.intermediate_size

    def _share(self, count: int, size: int = 1) -> slice:
        """This rank's share of `count` things of `size` elements each."""
        low, high = (i * count // self.ranks for i in (self.rank, self.rank + 1))
        return slice(low * size, high * size)

    def _kv_share(self) -> slice:
        s = self.spec
        first, count = self.rank * s.kv_heads // self.ranks, self.local.kv_heads
        return slice(first * s.head_dim, (first + count) * s.head_dim)

    def _divides(self, count: int, what: str) -> None:
        if count % self.ranks:
            raise ModelError(
                f"--tensor-parallel {self.ranks}: {count} {what} can't be split into equal shares"
            )


class CutCheckpoint:
    """A `Checkpoint` of one rank's share; reads nothing else."""

    def __init__(self, whole: Checkpoint, cut: Cut) -> None:
        self.name, self.spec = whole.name, cut.local
        self._whole, self._cut = whole, cut
        self.quantization = whole.quantization

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """This rank's part of a tensor.

        The biases of `o_proj` and `down_proj` are zero on all ranks but 0, because the ranks' outputs are
        summed.
        """
        assert part is None
        tensor = self._whole.read(name, self._cut.part(name))
        if name.endswith(("o_proj.bias", "down_proj.bias")) and self._cut.rank > 0:
            return torch.zeros_like(tensor)
        return tensor

    def read_weight(self, name: str, part: Part | None = None) -> Weight:
        """This rank's part of a linear layer's weight."""
        assert part is None
        return self._whole.read_weight(name, self._cut.part(name))

    def files(self) -> list[Path]:
        return self._whole.files()

    def close(self) -> None:
        self._whole.close()
