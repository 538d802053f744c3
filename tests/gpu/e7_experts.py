"""E7: steps of a mixture of experts, the 30B-A3B shape, against the floor of the experts that are chosen."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpu.bench import Bench, Case
from tests.gpu.e3_step import steps_of


def run(bench: Bench) -> Iterator[Case]:
    """The cases of E3 for this shape."""
    yield from steps_of(bench, "Qwen3-30B-A3B", bench.pick((1, 32, 128), (1, 4)))
