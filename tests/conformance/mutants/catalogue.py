"""The mutants: each breaks one promise of our executor, and names the file of the kit that must notice.

A mutant is a patch applied before the process starts; everything else is the real executor on the oracle
backend, whose logits depend on every cached slot. The engine's own check of its pages is off in all of them.
"""

from __future__ import annotations

from executor_service.cache.sequence_store import SequenceStore
from tests.conformance.mutants import wrong as wrong  # enters them
from tests.conformance.mutants.registry import MUTANTS as MUTANTS


def apply(name: str) -> None:
    """Break this process's executor."""
    SequenceStore.check = lambda self: None  # type: ignore[method-assign]
    MUTANTS[name].apply()
