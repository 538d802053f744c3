"""The `paceline` command. It imports no service, and starts them as processes."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `paceline` script."""
    from paceline.extras import installation

    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"paceline: {error.name} is not installed; {installation('cli')}")
    from paceline.cli.app import run

    run()
