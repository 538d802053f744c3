"""`TokenPages`: the token ids of all sequences on the device, in the pages of the KV cache.

A token's id has the page and the slot of its key and value. A row's history is therefore found through its
block table, with the tokens that the host does not know yet; and what holds for keys and values holds for
ids: prefix hits share them, forks and copied pages keep them, and rejected drafts are overwritten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch import Launch

_TILE = 256  # tokens of a program


@triton.jit(do_not_specialize=("out", "tokens", "pages", "slots", "count"))
def _store_kernel(
    out, ids, tokens, pages, slots, sampled, count, page_size: tl.constexpr, tile: tl.constexpr
):
    """Program (tile of tokens): look up the tokens that are not known, and store all in their pages."""
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    live = index < count
    token = tl.load(tokens + index, mask=live, other=0)
    row = tl.maximum(-1 - token, 0)
    token = tl.where(token < 0, tl.load(sampled + row, mask=live & (token < 0), other=0), token)
    page = tl.load(pages + index, mask=live, other=0).to(tl.int64)
    slot = tl.load(slots + index, mask=live, other=0)
    tl.store(ids + page * page_size + slot, token, mask=live)
    tl.store(out + index, token, mask=live)


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

    def store(
        self, tokens: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """Store a step's tokens, int32 [tokens], in their pages and slots; returns their ids.

        A token -1 - r is the one that row r of the step before sampled: sampled[r]. Nothing is read back.
        """
        out = torch.empty(len(tokens), dtype=torch.int32, device=tokens.device)
        self.launch(out, tokens, pages, slots, sampled).run()
        return out

    def launch(
        self,
        out: torch.Tensor,
        tokens: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        sampled: torch.Tensor,
    ) -> Launch:
        """The launch of `store`."""
        return Launch(
            _store_kernel,
            (-(-len(tokens) // _TILE), 1, 1),
            {
                "out": out, "ids": self.ids, "tokens": tokens, "pages": pages, "slots": slots,
                "sampled": sampled, "count": len(tokens),
            },
            {"page_size": self.page_size, "tile": _TILE},
            warps=4,
            stages=1,
        )  # fmt: skip
