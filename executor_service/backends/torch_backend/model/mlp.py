"""The MLP of a block: one that is gated, or a mixture of such."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from executor_service.backends.torch_backend.files.architecture.activation import sigmoid
from executor_service.backends.torch_backend.files.architecture.spec import MoeSpec
from executor_service.backends.torch_backend.files.stored_names import CORRECTION, SHARED_EXPERT, SHARED_GATE
from executor_service.backends.torch_backend.files.weights import Checkpoint
from executor_service.backends.torch_backend.model.experts import GatedWeights, experts
from executor_service.backends.torch_backend.model.norms import Norms
from executor_service.backends.torch_backend.model.shard import Shard
from executor_service.backends.torch_backend.ops.kernels import GatedLinear, Kernels, Linear
from executor_service.backends.torch_backend.ops.low_rank import NO_CHANGES, LayerChanges
from executor_service.backends.torch_backend.ops.stacked_experts import route_corrected

Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The shares and the experts of each token, by the router's logits; see `stacked_experts.route`."""


class Mlp:
    """A gated MLP; `norm`: of its result."""

    def __init__(
        self,
        kernels: Kernels,
        checkpoint: Checkpoint,
        prefix: str,
        norms: Norms,
        norm: torch.Tensor | None,
        shard: Shard,
    ) -> None:
        gate, up = (checkpoint.read_weight(f"{prefix}{part}_proj.weight") for part in ("gate", "up"))
        inner_bias = bias = None
        if checkpoint.spec.mlp_bias:
            gate_bias, up_bias, bias = (
                checkpoint.read(f"{prefix}{part}_proj.bias") for part in ("gate", "up", "down")
            )
            inner_bias = torch.cat([gate_bias, up_bias])
        self.gated: GatedLinear = kernels.gated(gate, up, checkpoint.spec.activation, inner_bias)
        down = kernels.linear([checkpoint.read_weight(prefix + "down_proj.weight")], bias)
        self.down = shard.summed(kernels, down)
        self.norm, self._norms = norm, norms

    def add(self, x: torch.Tensor, residual: torch.Tensor, changes: LayerChanges = NO_CHANGES) -> None:
        """residual += mlp(x)."""
        inner = self.gated(x, change=changes.gated)
        self._norms.add_linear(self.down, inner, self.norm, residual, changes.down)

    def bytes(self) -> int:
        """Bytes of the weights."""
        return self.gated.bytes() + self.down.bytes()


class SharedExpert:
    """The expert of a mixture that all tokens have; on a rank a part of it."""

    def __init__(self, kernels: Kernels, checkpoint: Checkpoint, prefix: str, moe: MoeSpec) -> None:
        layer = prefix.removesuffix("mlp.")
        gate, up, down = (
            checkpoint.read_weight(f"{layer}{SHARED_EXPERT}{part}_proj.weight")
            for part in ("gate", "up", "down")
        )
        self._gated = kernels.gated(gate, up, checkpoint.spec.activation)
        self._down = kernels.linear([down])
        self._gate: Linear | None = None
        if moe.shared_gate:
            self._gate = kernels.linear([checkpoint.read_weight(layer + SHARED_GATE)])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of the same shape."""
        out = self._down(self._gated(x))
        return out if self._gate is None else out * sigmoid(self._gate(x).float()).to(out.dtype)

    def bytes(self) -> int:
        """Bytes of the weights."""
        gate = 0 if self._gate is None else self._gate.bytes()
        return self._gated.bytes() + self._down.bytes() + gate


class MixtureMlp:
    """A mixture of gated MLPs; `norm`: of its result.

    A token's experts are summed in the order of their numbers, and then the one that all tokens have.
    A shard has the whole router (`gate.weight`), and a part of each expert's `gate`, `up` and `down`.
    """

    def __init__(
        self,
        kernels: Kernels,
        checkpoint: Checkpoint,
        prefix: str,
        norms: Norms,
        norm: torch.Tensor | None,
        moe: MoeSpec,
        shard: Shard,
    ) -> None:
        self.norm, self._norms, self._shard, self._kernels = norm, norms, shard, kernels
        bias = checkpoint.read(prefix + "gate.bias") if moe.clamped else None
        self.router: Linear = kernels.linear([checkpoint.read_weight(prefix + "gate.weight")], bias)
        count, renormalize = moe.experts_per_token, moe.norm_topk_prob
        self._route: Route = partial(kernels.route, count=count, renormalize=renormalize)
        if moe.corrected:
            correction = checkpoint.read(prefix + CORRECTION.removeprefix("mlp.")).float().to(kernels.device)
            self._route = partial(
                route_corrected,
                correction=correction,
                count=count,
                renormalize=renormalize,
                scale=moe.share_scale,
            )
        self.shared = SharedExpert(kernels, checkpoint, prefix, moe) if moe.shared_size else None

        def read(expert: int) -> GatedWeights:
            names = [f"{prefix}experts.{expert}.{part}_proj." for part in ("gate", "up", "down")]
            gate, up, down = (checkpoint.read_weight(name + "weight") for name in names)
            biases = [checkpoint.read(name + "bias") for name in names] if moe.clamped else None
            if biases is None:
                return GatedWeights(gate, up, down)
            return GatedWeights(gate, up, down, torch.cat(biases[:2]), biases[2])

        spec = checkpoint.spec
        self.experts = experts(kernels, moe, spec.hidden_size, spec.activation, read)

    def add(self, x: torch.Tensor, residual: torch.Tensor, changes: LayerChanges = NO_CHANGES) -> None:
        """residual += sum of the weighted experts of each token, which adapters do not change.

        Both are [tokens, hidden].
        """
        shares, chosen = self._route(self.router(x))
        part = self.experts(x, shares, chosen)
        if self.shared is not None:
            part += self.shared(x)
        # Each rank adds up its parts of the experts; then one sum over the ranks completes all of them.
        total = self._shard.sum(self._kernels, part)
        self._norms.add(total, self.norm, residual)

    def bytes(self) -> int:
        """Bytes of the weights."""
        shared = 0 if self.shared is None else self.shared.bytes()
        return self.router.bytes() + self.experts.bytes() + shared
