"""`PagedAttentionSettings`: the reference model's. Knows no numpy."""

from __future__ import annotations

from executor_service.backends.settings import SyntheticModelSettings


class PagedAttentionSettings(SyntheticModelSettings):
    """The reference model; the shape of its heads is no setting."""
