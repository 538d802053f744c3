"""Scales for keys and values of 8 bits, as compressed-tensors and AutoFP8 write them: read over, with a word.

Here pages of 8 bits have a scale for each token and head, of what they hold: see `page_format`.
"""

from __future__ import annotations

from service_kit.logs import Log

from executor_service.files.fields import Fields

_SUFFIXES = frozenset(
    {
        "k_scale",
        "v_scale",
        "kv_scale",
        "q_scale",
        "k_zero_point",
        "v_zero_point",
        "q_zero_point",
        "output_scale",
    }
)
"""Of the tensors, in a layer's attention or in its projections."""

log = Log(__name__)


def unused_scales(config: Fields) -> frozenset[str]:
    """The suffixes of tensors that `kv_cache_scheme` has in the files; none without that field."""
    if not config.get("kv_cache_scheme", None):
        return frozenset()
    log.warning(
        "kv_cache_scheme: its scales of keys and values are not used; 8-bit pages have scales of their own"
    )
    return _SUFFIXES
