"""`PagedAttentionSettings`: settings of the reference model. Does not import numpy."""

from __future__ import annotations

from executor_service.backends.settings import SyntheticModelSettings


class PagedAttentionSettings(SyntheticModelSettings):
    """Settings of the reference model; the shape of its heads is fixed."""
