"""The `paceline` command. It imports no service, and starts them as processes."""

from __future__ import annotations

import io
import signal
import sys


def main() -> None:
    """Entry point of the `paceline` script.

    Until a command begins, Ctrl-C ends the process without a word: imports would print where they were.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as nohup has it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    write_any_text()
    from paceline.extras import installation

    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"paceline: {error.name} is not installed; {installation('cli')}")
    from paceline.cli.app import run

    run()


def write_any_text() -> None:
    """Have stdout take what its encoding lacks, where that is not UTF-8: as ?, in a file as \\uNNNN."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace" if sys.stdout.isatty() else "backslashreplace")
