"""`WeightFormat`: what a format of quantized weights knows of its tensors; and how groups are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.files.fields import Fields, shown

WHOLE_ROW = -1
"""The group size that stands for one group in each row."""


class WeightFormat(Protocol):
    """One format with one configuration. What raises, raises ModelError naming tensor or field."""

    title: str  # for users: "GPTQ with 4 bits"
    main: str  # suffix of the tensor that every quantized module has
    beside: frozenset[str]  # suffixes of what else belongs to a quantized module
    unused: frozenset[str]  # suffixes of tensors that mean nothing here, of whatever module
    plain_modules: frozenset[str]  # modules that the configuration lists as not quantized

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        """The shape [n, k] of the weight, from the headers of the module's tensors, all of them checked."""

    def check(self, module: QuantizedModule) -> None:
        """Check the values of scales and indices; `shape` was called before."""

    def read(self, module: QuantizedModule) -> ScaledNumbers:
        """The weight; `shape` was called before."""


def group_count(module: QuantizedModule, suffix: str, k: int, size: int) -> int:
    """Groups of `size` columns in rows of k. Raises ModelError naming the tensor if they do not divide k."""
    if size == WHOLE_ROW:
        return 1
    if k % size:
        raise module.fault(suffix, f"has rows of {k} numbers, which groups of {size} do not divide")
    return k // size


def columns_in_groups(k: int, size: int) -> torch.Tensor:
    """The group of each of k columns: int64 [k]; the last group may be smaller."""
    return torch.arange(k) // (k if size == WHOLE_ROW else size)


def group_size(f: Fields, default: int | None = None) -> int:
    """The field `group_size`: a positive number, or -1 for one group in each row. Raises ModelError."""
    return WHOLE_ROW if f.get("group_size", default) == WHOLE_ROW else f.size("group_size", default)


def of_groups(size: int) -> str:
    """The group size in words."""
    return "with a scale for each row" if size == WHOLE_ROW else f"in groups of {size}"


def packed_bits(f: Fields, supported: Sequence[int]) -> int:
    """The field `bits`. Raises ModelError if it is missing or not supported."""
    bits = f.size("bits")
    if bits not in supported:
        raise f.fault(f"bits {bits} is not supported, only {' and '.join(map(str, supported))}")
    return bits


def module_names(f: Fields, keys: Sequence[str]) -> frozenset[str]:
    """The modules that some fields list, in one set; patterns are not evaluated. Raises ModelError."""
    names: set[str] = set()
    for key in keys:
        given = f.get(key, [])
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise f.fault(f"{key} is {shown(given)}, expected a list of modules")
        names.update(given)
    return frozenset(names)
