"""Hides installed packages from a process and those it starts: modules and metadata named in a JSON file.

Python imports this by its name at start, if its folder is in PYTHONPATH: see `hidden_packages.py`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HIDDEN = json.loads(Path(os.environ["HIDDEN_PACKAGES"]).read_text())
_MODULES, _PACKAGES = frozenset(_HIDDEN["modules"]), frozenset(_HIDDEN["packages"])


_EVERY = DistributionFinder.Context()


class _Finder(PathFinder):
    """Finds what the ordinary finder finds, but for what is hidden."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname in _MODULES else super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, context: Any = _EVERY) -> Iterator[Any]:
        for found in PathFinder.find_distributions(context):
            if re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower() not in _PACKAGES:
                yield found


sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
