"""`--mutant NAME [executor flags]`: that executor. `--table [NAME ...]`: what kills each of them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.conformance.mutants import catalogue, harness


def serve(name: str, arguments: list[str]) -> int:
    """Break this process's engine, then be an executor."""
    catalogue.apply(name)
    from executor_service import __main__ as executor

    sys.argv[1:] = arguments
    return executor.main()


def table(names: list[str]) -> int:
    """Run the whole kit against each mutant; the number of survivors."""
    survivors = 0
    print("| mutant | what it breaks | checks that fail | among them |")
    print("|---|---|---|---|")
    for name in names or catalogue.MUTANTS:
        mutant = catalogue.MUTANTS[name]
        with tempfile.TemporaryDirectory() as directory:
            checks = harness.failing_checks(name, Path(directory))
        own = [check.split("::")[1] for check in checks if check.startswith(mutant.check)]
        survivors += not own
        among = f"{mutant.check}: {', '.join(own[:3])}" if own else f"**none in {mutant.check}**"
        print(f"| {name} | {mutant.breaks} | {len(checks)} | {among} |", flush=True)
    return survivors


def main() -> int:
    """Parse by hand: what is not ours goes on to the executor."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--table"]:
        return table(arguments[1:])
    if "--mutant" in arguments:
        at = arguments.index("--mutant")
        name = arguments[at + 1]
        return serve(name, arguments[:at] + arguments[at + 2 :])
    print(__doc__, *catalogue.MUTANTS, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
