"""How calls that treat row by row are cut into chunks."""

from __future__ import annotations

ROWS_AT_ONCE = 4
"""Rows of a chunk; fewer are not worth a second thread."""
