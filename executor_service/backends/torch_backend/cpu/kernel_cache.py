"""Where compiled kernels are kept: a folder named after the kernels' sources.

Numba keys its cache by the file of the outermost function alone and would run stale machine code after a
change in a file that it calls into. Import this before any module with kernels.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba

if "NUMBA_CACHE_DIR" not in os.environ:
    _digest = hashlib.sha256()
    for _source in sorted(Path(__file__).parent.glob("*.py")):  # what kernels call is all in this room
        _digest.update(_source.read_bytes())
    _base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    _folder = _base / "paceline" / f"kernels-{_digest.hexdigest()[:16]}"
    try:
        _folder.mkdir(parents=True, exist_ok=True)
        numba.config.CACHE_DIR = str(_folder)  # type: ignore[attr-defined]
    except OSError:
        pass  # numba falls back to the folder of the sources
