"""`TokenPages`: the token ids of all sequences on the device, in the pages of the KV cache.

A token's id has the page and the slot of its key and value. A row's history is therefore found through its
block table, with the tokens that the host does not know yet; and what holds for keys and values holds for
ids: prefix hits share them, forks and copied pages keep them, and rejected drafts are overwritten. `resolve`
stores them.
"""

from __future__ import annotations

import torch


class TokenPages:
    """Ids of the tokens in `pages` pages of `page_size` each; those of page 0 are nobody's."""

    def __init__(self, pages: int, page_size: int, device: torch.device) -> None:
        self.ids = torch.zeros(pages, page_size, dtype=torch.int32, device=device)

    @property
    def page_size(self) -> int:
        return self.ids.shape[1]

    def copy(self, source: int, target: int) -> None:
        """Copy a page."""
        self.ids[target] = self.ids[source]
