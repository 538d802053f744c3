"""The experts of a mixture, computed one after the other or in two grouped matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from executor_service.backends.torch_backend.activation import Activation
from executor_service.backends.torch_backend.kernels import GatedLinear, Kernels, Linear
from executor_service.backends.torch_backend.scaled_numbers import Weight, plain
from executor_service.backends.torch_backend.spec import MoeSpec

Read = Callable[[int], tuple[Weight, Weight, Weight]]
"""The weights of one expert, a gated MLP: gate and up [inner, hidden], down [hidden, inner]."""

_ALIGNMENT = 16  # bytes: row alignment that grouped products need


class Experts(Protocol):
    """All experts of a layer."""

    def __call__(self, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, in the order of expert indices, [tokens, hidden].

        x [tokens, hidden]; shares fp32 and chosen int64 [tokens, experts of a token], as `routing.route` has
        them.
        """

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a call, since the host reads nothing from the device."""

    def bytes(self) -> int:
        """Bytes of the weights."""


def experts(kernels: Kernels, moe: MoeSpec, hidden: int, activation: Activation, read: Read) -> Experts:
    """Grouped experts if the kernels and sizes allow them, else one by one. Reads one expert at a time."""
    aligned = all(size * kernels.dtype.itemsize % _ALIGNMENT == 0 for size in (moe.intermediate_size, hidden))
    if kernels.groups and aligned:
        return GroupedExperts(kernels, moe, hidden, activation, read)
    return EachExpert(kernels, moe, activation, read)


class EachExpert:
    """Computes the chosen experts one after the other; the host waits for the list of chosen experts."""

    capturable = False

    def __init__(self, kernels: Kernels, moe: MoeSpec, activation: Activation, read: Read) -> None:
        self._experts: list[tuple[GatedLinear, Linear]] = []
        for i in range(moe.experts):
            gate, up, down = read(i)
            self._experts.append((kernels.gated(gate, up, activation), kernels.linear([down])))

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
    """Tokens sorted by expert, then `grouped_mm` twice.

    In bf16 on GPUs of compute capability 9 and 10, the grouped product is one kernel and the host does not
    wait. Elsewhere torch multiplies expert by expert, and the host waits for the number of tokens of each.
    """

    def __init__(
        self, kernels: Kernels, moe: MoeSpec, hidden: int, activation: Activation, read: Read
    ) -> None:
        self._activation = activation
        count, inner = moe.experts, moe.intermediate_size
        device, dtype = kernels.device, kernels.dtype
        a_kernel = dtype == torch.bfloat16 and device.type == "cuda"
        self.capturable = a_kernel and torch.cuda.get_device_capability(device)[0] in (9, 10)
        self._gate_up = torch.empty(count, 2 * inner, hidden, device=device, dtype=dtype)
        self._down = torch.empty(count, hidden, inner, device=device, dtype=dtype)
        for i in range(count):
            gate, up, down = map(plain, read(i))
            self._gate_up[i, :inner], self._gate_up[i, inner:], self._down[i] = gate, up, down

    def __call__(self, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ids, places = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self._down), device=x.device)
        ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)
        gate, up = self._product(x[places // chosen.shape[1]], self._gate_up, ends).chunk(2, dim=-1)
        out = x.new_empty(len(places), x.shape[1])
        out[places] = self._product(self._activation.of(gate) * up, self._down, ends)
        weighted = out.view(*chosen.shape, -1).float() * shares[..., None]
        return weighted.sum(1).to(x.dtype)

    def bytes(self) -> int:
        size: int = self._gate_up.nbytes + self._down.nbytes
        return size

    @staticmethod
    def _product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(x, weights.transpose(-2, -1), offs=ends)
