"""A check that can't fail checks nothing: every mutant must be caught, and where it is wrong."""

from pathlib import Path

import pytest

from tests.conformance.mutants.catalogue import MUTANTS
from tests.conformance.mutants.harness import failing_checks

ALWAYS = ("stale-page", "replay-applies-twice")


@pytest.mark.parametrize("name", ALWAYS)
def test_the_kit_catches(name: str, tmp_path: Path) -> None:
    file = MUTANTS[name].check
    assert failing_checks(name, tmp_path, file), f"{name} passes {file}: {MUTANTS[name].breaks}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(ALWAYS)))
def test_the_kit_catches_this_one_too(name: str, tmp_path: Path) -> None:
    file = MUTANTS[name].check
    assert failing_checks(name, tmp_path, file), f"{name} passes {file}: {MUTANTS[name].breaks}"
