"""Wrong executors, by the file of the kit that catches them: those of `pages.py` by `test_pages.py`."""

from __future__ import annotations

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(module.name)
