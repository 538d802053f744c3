"""`ModelError`: what a model, or an adapter of it, can't be loaded for."""

from __future__ import annotations


class ModelError(Exception):
    """The model can't be loaded or served; the message names the file or setting and its fault."""
