"""`Bench`: what an experiment is given. `Case`: what it yields, a row of results at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from executor_service.backends.torch_backend.config import TorchConfig
from tests.gpu.floors import H100, Machine
from tests.gpu.random_weights import RandomBackend
from tests.gpu.shapes import write_config

PAGE = 16  # tokens
DTYPE = "bfloat16"

Case = dict[str, Any]
"""Plain JSON."""

T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """One run: where, how large, and what earlier experiments of the run found."""

    device: torch.device
    dry: bool
    directory: Path  # for files that are not kept
    found: Mapping[str, list[Case]]

    @property
    def threads(self) -> int:
        """Of torch on CPU: dry runs have little to compute, and neighbours. 0: one a core."""
        return int(self.dry)

    def pick(self, full: T, dry: T) -> T:
        """The size of the real run or of the dry one."""
        return dry if self.dry else full

    @property
    def machine(self) -> Machine:
        """The ceilings E0 measured, or else those of an H100. Bytes: copied or read, whichever is faster."""
        for case in self.found.get("E0", []):
            if not self.dry:
                rate = max(case["copy_tb_s"], case.get("read_tb_s", 0.0))
                return Machine(rate * 1e12, case["matmul_tflop_s"] * 1e12)
        return H100

    def decode_of(self, shape: str, rows: int) -> Case:
        """What E3 found of so many rows' decode; empty if this run has not got it."""
        for case in self.found.get("E3", []):
            if (case["shape"], case["kind"]) == (shape, "decode") and case["rows"] == rows:
                return case
        return {}

    def model(self, name: str) -> Path:
        """A directory with the model's config.json, and no weights."""
        return write_config(name, self.directory, dry=self.dry)

    def backend(
        self, name: str, tokens: int = 0, *, dependent: bool | None = None, layers: int = 0
    ) -> RandomBackend:
        """Loaded, with random weights, and KV storage full of random numbers for so many tokens.

        `dependent`: with programmatic dependent launch; None: if the device has it. `layers`: 0: the model's.
        """
        config = TorchConfig(
            write_config(name, self.directory, dry=self.dry, layers=layers),
            device=str(self.device),
            dtype=DTYPE,
            threads=self.threads,
            programmatic_dependent_launch=dependent,
        )
        backend = RandomBackend(config)
        backend.load(lambda what, done: None)
        if tokens:
            backend.allocate(1 + -(-tokens // PAGE), PAGE)
            backend.fill_caches()
        return backend


@dataclass(frozen=True)
class Experiment:
    """What is measured under one name."""

    name: str
    title: str
    run: Callable[[Bench], Iterator[Case]]
    most_s: float  # it is ended after so long, and keeps what it had
