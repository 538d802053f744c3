"""Runs the kit against a mutant, as a user would: another process at the other end of gRPC."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.conformance.kit.target import ADAPTERS, arguments
from tests.conformance.mutants.catalogue import MUTANTS
from tests.support.checkout import ROOT
from tests.support.processes import running

KIT = Path(__file__).parent.parent


def failing_checks(name: str, directory: Path, file: str = "") -> list[str]:
    """The kit's checks that fail against a mutant, as "file::check"; all of the kit or one file of it."""
    module = "tests.conformance.mutants"
    flags = arguments(MUTANTS[name].backend, directory)
    with running(module, ["--mutant", name, *flags], directory) as process:
        report = directory / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", str(KIT / file), "--executor", process.address),
            *("--adapters", ",".join(ADAPTERS)),
            *("--kit-seed", "0", "--junitxml", str(report), "--tb", "no", "-p", "no:cacheprovider"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        if not process.running:
            raise RuntimeError(f"{name} died instead of answering wrongly:\n{process.log}")
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the kit itself failed:\n{done.stdout}\n{done.stderr}")
    return _failed(report)


def _failed(report: Path) -> list[str]:
    checks = []
    for case in ElementTree.parse(report).iter("testcase"):
        if next(case.iter("failure"), None) is not None or next(case.iter("error"), None) is not None:
            file = case.get("classname", "").split(".")[-1] + ".py"
            check = f"{file}::{case.get('name', '').split('[')[0]}"
            if check not in checks:
                checks.append(check)
    return checks
