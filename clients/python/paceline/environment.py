"""What a client takes from the environment where its caller names nothing: addresses, token, TLS files.

The command line reads the same variables.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.channel import SCHEDULER_ADDRESS, Security

ADDRESS_VARIABLE = "PACELINE_ADDRESS"
TOKEN_VARIABLE = "PACELINE_TOKEN"
TLS_VARIABLES = ("PACELINE_TLS_CA", "PACELINE_TLS_CERT", "PACELINE_TLS_KEY")


def addresses_or_default(given: str | Sequence[str] | None) -> str | Sequence[str]:
    """The given addresses; None: those of PACELINE_ADDRESS, else the default address."""
    return given if given is not None else os.environ.get(ADDRESS_VARIABLE) or SCHEDULER_ADDRESS


def security_or_default(given: Security | None) -> Security:
    """The given token and TLS files; None: those of PACELINE_TOKEN and PACELINE_TLS_CA, _CERT and _KEY.

    Raises ValueError, naming the variables, if they can't be used.
    """
    if given is not None:
        return given
    ca, cert, key = (Path(path) if (path := os.environ.get(name)) else None for name in TLS_VARIABLES)
    try:
        return Security(ca, cert, key, os.environ.get(TOKEN_VARIABLE, ""))
    except ValueError as error:
        raise ValueError(f"{TOKEN_VARIABLE}, {', '.join(TLS_VARIABLES)}: {error}") from None
