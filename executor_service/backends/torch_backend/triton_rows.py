"""`AttentionRows`: the rows of one class, cut into query blocks; built on the device by `cut`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHORT_TOKENS = 8  # of a short row at most: a decode, or a verify of up to 7 drafts
# Lines of a query block's matrix: its tokens times the query heads that share a KV head. fp32, which no
# matrix instruction takes whole, would not fit into the registers with more.
_SHORT_LINES, _LONG_LINES, _LONG_LINES_FP32 = 32, 128, 32


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Rows of one class. All tensors are int32 and lie on the device of q.

    A row is `q_lens[r]` tokens from `q_starts[r]` of the step's flat tokens. They are the last ones of its
    `kv_lens[r]` keys, which lie in the pages that `block_table[slots[r]]` names. A padding row has kv_len 0:
    it reads nothing, and the results of its tokens, if any, are zeros. Rows may come in any order.
    """

    slots: torch.Tensor  # [rows]
    q_starts: torch.Tensor  # [rows]
    q_lens: torch.Tensor  # [rows]: 0 to most_tokens
    kv_lens: torch.Tensor  # [rows], this step's tokens included: at least q_lens, or 0
    block_rows: torch.Tensor  # [blocks]: the row of each query block, -1 where there is none
    block_firsts: torch.Tensor  # [blocks]: which of its row's tokens is the block's first
    block_tokens: int  # tokens of a block at most
    most_tokens: int  # of a row

    def __post_init__(self) -> None:
        for name in ("slots", "q_starts", "q_lens", "kv_lens", "block_rows", "block_firsts"):
            tensor: torch.Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} has to be int32 and contiguous")

    @property
    def short(self) -> bool:
        """Whether the rows are decodes and verifies, rather than chunks and whole prompts."""
        return self.most_tokens <= SHORT_TOKENS


def cut(
    slots: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    tokens: int,
    most_tokens: int,
    group: int,
    dtype: torch.dtype,
) -> AttentionRows:
    """Rows of at most `most_tokens` tokens each and `tokens` in all, cut for the attention of a model.

    `group` is the number of query heads that share a KV head, `dtype` that of q. `most_tokens` tells the
    class. Put a row into a call by its own length: one of at most SHORT_TOKENS into a call with most_tokens
    <= SHORT_TOKENS, one of more into a call with more; else its result depends on its company. Raises
    ValueError where a tensor is not int32 or not contiguous.

    Nothing is read back, and the number of blocks is a bound that follows from shapes and the Python
    numbers: a CUDA graph may capture this. Blocks that the bound has too many are marked and cost little.
    """
    short, rows = most_tokens <= SHORT_TOKENS, slots.shape[0]
    lines = _SHORT_LINES if short else _LONG_LINES_FP32 if dtype == torch.float32 else _LONG_LINES
    block_tokens = max(lines // group, 1)
    if short:
        block_tokens = min(block_tokens, SHORT_TOKENS)
    blocks = min(tokens // block_tokens + rows, rows * -(-most_tokens // block_tokens))
    counts = (q_lens + (block_tokens - 1)) // block_tokens
    ends = counts.cumsum(0, dtype=torch.int32)
    # The last blocks of a long row see the most keys: they start first.
    numbers = torch.arange(blocks - 1, -1, -1, dtype=torch.int32, device=slots.device)
    owners = torch.searchsorted(ends, numbers, right=True, out_int32=True)
    begins = (ends - counts)[owners.clamp(max=rows - 1)]
    return AttentionRows(
        slots=slots,
        q_starts=q_starts,
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_rows=torch.where(owners < rows, owners, -1),
        block_firsts=(numbers - begins) * block_tokens,
        block_tokens=block_tokens,
        most_tokens=most_tokens,
    )
