"""`BlockScales`: scales of a weight [n, k], one for each block of rows x columns."""

from __future__ import annotations

import torch

from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.checkpoints.weight_format import (
    WHOLE_ROW,
    columns_in_groups,
)
from executor_service.files.fields import Fields, shown
from executor_service.files.safetensors_header import FLOATS


class BlockScales:
    """Blocks of one size; those at the end of a weight may be smaller."""

    def __init__(self, block: tuple[int, int] | None) -> None:
        """`block`: rows and columns. None: one scale is the whole weight's, or each row has one."""
        self.block = block

    def check_shape(self, module: QuantizedModule, suffix: str, n: int, k: int) -> None:
        """Raises ModelError unless a tensor has the scales of a weight [n, k]."""
        if self.block is None:
            module.expect(suffix, FLOATS, (), (1,), (1, 1), (n,), (n, 1))
        else:
            module.expect(suffix, FLOATS, self.grid(n, k))

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """How many blocks a weight [n, k] has."""
        rows, columns = self.block or (1, k)
        return -(-n // rows), -(-k // columns)

    def of_rows(self, grid: torch.Tensor, n: int) -> torch.Tensor:
        """Values of blocks, [] to [blocks, blocks], as values of n rows and their groups of columns."""
        if self.block is None:
            return grid.reshape(-1, 1).expand(n, 1)
        return grid.repeat_interleave(self.block[0], 0)[:n]

    def groups(self, k: int) -> torch.Tensor:
        """The group of each of k columns, int64 [k]."""
        return columns_in_groups(k, WHOLE_ROW if self.block is None else self.block[1])


def block_size(f: Fields, key: str) -> tuple[int, int] | None:
    """A field of two positive numbers, rows and columns; None if it is missing or null. Raises ModelError."""
    given = f.get(key, None)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2:
        raise f.fault(f"{key} is {shown(given)}, expected the rows and columns of a block")
    sizes = Fields(dict(zip(("rows", "columns"), given, strict=True)), f"{f.where}: {key}")
    return sizes.size("rows"), sizes.size("columns")
