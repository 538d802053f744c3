"""The experts of a mixture, computed one after the other or in two grouped matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.architecture.spec import MoeSpec
from executor_service.backends.torch_backend.files.scaled_numbers import Weight, plain
from executor_service.backends.torch_backend.ops.kernels import GatedLinear, Kernels, Linear
from executor_service.backends.torch_backend.ops.stacked_experts import StackedExperts


class GatedWeights(NamedTuple):
    """The weights of one expert, a gated MLP."""

    gate: Weight  # [inner, hidden]
    up: Weight  # the same
    down: Weight  # [hidden, inner]
    inner_bias: torch.Tensor | None = None  # [2 inner]: of gate, then of up
    bias: torch.Tensor | None = None  # [hidden]


Read = Callable[[int], GatedWeights]
"""The weights of an expert, by its number."""

_ALIGNMENT = 16  # bytes: row alignment that grouped products need


class Experts(Protocol):
    """All experts of a layer."""

    def __call__(self, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, in the order of expert indices, [tokens, hidden].

        x [tokens, hidden]; shares fp32 and chosen int64 [tokens, experts of a token], as
        `stacked_experts.route` has them.
        """

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a call, since the host reads nothing from the device."""

    def bytes(self) -> int:
        """Bytes of the weights."""


def experts(kernels: Kernels, moe: MoeSpec, hidden: int, activation: Activation, read: Read) -> Experts:
    """Grouped experts if the kernels and sizes allow them, else one by one. Reads one expert at a time."""
    aligned = all(size * kernels.dtype.itemsize % _ALIGNMENT == 0 for size in (moe.intermediate_size, hidden))
    if kernels.sum_experts is not None and aligned and not moe.clamped:
        return GroupedExperts(kernels, moe, hidden, activation, read)
    return EachExpert(kernels, moe, activation, read)


class EachExpert:
    """Computes the chosen experts one after the other; the host waits for the list of chosen experts."""

    capturable = False

    def __init__(self, kernels: Kernels, moe: MoeSpec, activation: Activation, read: Read) -> None:
        self._experts: list[tuple[GatedLinear, Linear]] = []
        for i in range(moe.experts):
            w = read(i)
            gated = kernels.gated(w.gate, w.up, activation, w.inner_bias)
            self._experts.append((gated, kernels.linear([w.down], w.bias)))

    def __call__(self, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            gated, down = self._experts[expert]
            out = down(gated(x[tokens]))
            total.index_add_(0, tokens, out * shares[tokens, place, None].to(out.dtype))
        return total

    def bytes(self) -> int:
        return sum(gated.bytes() + down.bytes() for gated, down in self._experts)


class GroupedExperts:
    """Experts with stacked weights, by the `sum_experts` of the kernels, which must have one.

    In bf16 on GPUs of compute capability 9 and 10, the grouped product is one kernel and the host does not
    wait. Elsewhere torch multiplies expert by expert, and the host waits for the number of tokens of each.
    """

    def __init__(
        self, kernels: Kernels, moe: MoeSpec, hidden: int, activation: Activation, read: Read
    ) -> None:
        assert kernels.sum_experts is not None
        self._sum = kernels.sum_experts
        count, inner = moe.experts, moe.intermediate_size
        device, dtype = kernels.device, kernels.dtype
        a_kernel = dtype == torch.bfloat16 and device.type == "cuda"
        self.capturable = a_kernel and torch.cuda.get_device_capability(device)[0] in (9, 10)
        gate_up = torch.empty(count, 2 * inner, hidden, device=device, dtype=dtype)
        down = torch.empty(count, hidden, inner, device=device, dtype=dtype)
        for i in range(count):
            gate, up, out = map(plain, read(i)[:3])
            gate_up[i, :inner], gate_up[i, inner:], down[i] = gate, up, out
        self._weights = StackedExperts(gate_up, down, activation)

    def __call__(self, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self._sum(x, shares, chosen, self._weights)

    def bytes(self) -> int:
        size: int = self._weights.gate_up.nbytes + self._weights.down.nbytes
        return size
