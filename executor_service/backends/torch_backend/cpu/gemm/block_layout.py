"""`Layout`: how blocks of quantized weights and of activations lie in memory; the kernels' order.

A block is 32 numbers along K. Of each block a panel has the codes of its 16 columns, then their scales, then
their minima. Codes are bytes, or nibbles, two of which share a byte: 64 bytes hold four k of each column,
with nibbles eight, the first four in the lower halves. A number is

    scale * (code - OFFSET)     with nibbles, which are unsigned
    scale * code                with bytes, which are signed
    scale * code + minimum      with minima

A row of activations has of each block 32 int8, their scale in fp32, the sums of the first and the second 16
as int32, and the sum of all times the scale in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from executor_service.backends.torch_backend.cpu.primitives.registers import LANES

BLOCK = 32
"""Numbers of a block."""
OFFSET = 8
"""What nibbles without minima have more than the number they stand for."""
STEP = 4
"""Numbers along K that one step multiplies, a byte each."""
LARGEST_ACTIVATION = 127

ROW_SCALE, ROW_SUMS, ROW_WEIGHTED_SUM = BLOCK, BLOCK + 4, BLOCK + 12
"""Bytes from a block of activations to its parts."""
ROW_BLOCK_BYTES = BLOCK + 16


class Layout(NamedTuple):
    """What a panel's blocks hold."""

    nibbles: bool  # else bytes
    minima: bool
    wide: bool  # scales and minima are fp32, else fp16
    group: int  # numbers that share a scale: 32, or 16

    @property
    def name(self) -> str:
        """Of the kernels."""
        codes, scales = "nibbles" if self.nibbles else "bytes", "32" if self.wide else "16"
        return f"blocks_{codes}_{scales}_{self.group}_{int(self.minima)}"

    @property
    def scale_bytes(self) -> int:
        """Of one scale or minimum."""
        return 4 if self.wide else 2

    @property
    def groups(self) -> int:
        """Of a block."""
        return BLOCK // self.group

    @property
    def codes_bytes(self) -> int:
        """Of a panel's block."""
        return BLOCK * LANES // (2 if self.nibbles else 1)

    @property
    def scales_bytes(self) -> int:
        """Of a panel's block; as many bytes of minima follow where there are any."""
        return self.groups * LANES * self.scale_bytes

    @property
    def block_bytes(self) -> int:
        """Of a panel."""
        return self.codes_bytes + self.scales_bytes * (2 if self.minima else 1)
