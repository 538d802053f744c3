"""The experiments, and the lists of them that one call of ten minutes has time for."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gpu.bench import Bench, Case, Experiment

CALL_S = 600.0
"""A call on a lent machine is killed after so long."""
SPARE_S = 85.0
"""Of it: for wheels, imports, plots, and what is slower than on the machine where this was written."""

_EXPERIMENTS = {
    "device": ("what there is", "machine", 60),
    "kernels": ("Triton kernels compiled by as many processes as cores", "compiled_kernels", 60),
    "E0": ("ceilings: copy and bf16 matmul", "e0_ceilings", 15),
    "check": ("tokens on the device, in transformers and on CPU", "check_tokens", 180),
    "E6": ("bits: decode and verify, alone and in a batch", "e6_bits", 45),
    "E9": ("programmatic dependent launch, on and off", "e9_dependent_launch", 120),
    "E3": ("whole steps of the backend", "e3_step", 135),
    "E5": ("through gRPC, one and two steps in flight", "e5_service", 120),
    "E8": ("the same model in transformers", "e8_transformers", 125),
    "E1": ("linear layers: bf16, int8, fp8, int4", "e1_linears", 60),
    "E2": ("attention beside SDPA and FlashInfer", "e2_attention", 60),
    "E7": ("a mixture of experts", "e7_experts", 110),
    "E4": ("cold start, compile time and memory", "e4_loading", 150),
    "E10": ("memory errors, races and counters by NVIDIA's tools", "e10_tools", 120),
    "E11": ("products of few rows by how they are tuned", "e11_tuning", 60),
    "E12": ("attention of decodes by how it is cut and compiled", "e12_attention", 60),
}
FIRST = ("device", "kernels", "E0")
"""What each call begins with: another call's machine may be another one, and has not compiled anything."""
LISTS = {
    "right": ("check", "E6", "E9"),
    "fast": ("E3", "E5", "E8"),
    "why": ("E1", "E2", "E7", "E4"),
    "tools": ("E10",),
    "tune": ("E11", "E12"),
}
"""Is it right, how fast is it, why, and what would be faster: in order of value, also within each."""


def names_of(wanted: str) -> list[str]:
    """The experiments of a text such as "right,E3": FIRST, then those in its order, each once.

    Raises ValueError for what is neither a list nor an experiment.
    """
    names: list[str] = []
    for name in wanted.split(","):
        if name not in LISTS and name not in _EXPERIMENTS:
            known = ", ".join([*LISTS, *_EXPERIMENTS])
            raise ValueError(f"there is no list and no experiment {name!r}; there are {known}")
        names += LISTS.get(name, (name,))
    return list(dict.fromkeys([*FIRST, *names]))


def experiment(name: str) -> Experiment:
    """The one of this name, whose module is imported when it runs: one that can't be costs no other."""
    from tests.gpu.bench import Experiment  # not above: the lists are checked before torch is imported

    title, module, most_s = _EXPERIMENTS[name]

    def run(bench: Bench) -> Iterator[Case]:
        yield from import_module(f"tests.gpu.{module}").run(bench)

    return Experiment(name, title, run, most_s)


def most_s(names: list[str]) -> float:
    """How long these take at most, by their own limits."""
    return float(sum(_EXPERIMENTS[name][2] for name in names))
