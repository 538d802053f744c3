"""How to install one of Paceline's extras, for errors about packages that are missing.

No package index has Paceline, so advice must not name it as a package: one of that name would be another's.
"""

from __future__ import annotations


def installation(extra: str) -> str:
    """Advice on what installs an extra."""
    return f'in a clone of Paceline: pip install -c constraints.txt ".[{extra}]"'
