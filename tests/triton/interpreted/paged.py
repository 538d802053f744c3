"""Sequences in poisoned pages: K and V of known tokens, and NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from executor_service.backends.torch_backend.cuda.attention.attention import new_arrivals, paged_attention
from executor_service.backends.torch_backend.cuda.layout.resolve import HostRows, items_launch
from executor_service.backends.torch_backend.cuda.layout.row_ends import RowEnds
from executor_service.backends.torch_backend.cuda.layout.rows import (
    AttentionRows,
    Ints,
    Tiling,
    attention_rows,
    cut,
)
from executor_service.backends.torch_backend.ops.kernels import NONE
from executor_service.backends.torch_backend.ops.page_format import get, plain_cache, put


@dataclass(frozen=True)
class Row:
    """The last q_len tokens of the first kv_len tokens of a sequence."""

    sequence: int
    kv_len: int
    q_len: int


class Paged:
    """`lengths[i]` tokens of sequence i; every sequence knows its q, k and v at every position."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        width: int = 0,
        window: int = 0,
        pages_dtype: torch.dtype | None = None,
        cap: float = 0.0,
        sinks: bool = False,
    ) -> None:
        """`pages_dtype`: of 8 bits; None: `dtype`. k and v are what pages of 8 bits make of them.

        `cap` of the scores, 0: none; with `sinks` each head has one, near the largest of its scores.
        """
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.window, self.cap = window, cap
        self.sinks = torch.linspace(-1.0, 4.0, heads) if sinks else NONE
        rng = np.random.default_rng(3)
        counts = [-(-length // page_size) for length in lengths]
        numbers = iter((rng.permutation(sum(counts)) + 1).tolist())  # page 0 is scratch
        self.cache = plain_cache(
            sum(counts) + 1, page_size, kv_heads, head_dim, pages_dtype or dtype, torch.device("cpu")
        )
        for tensor in (self.cache.k, self.cache.v, self.cache.scales):
            tensor.copy_(torch.full((), torch.nan if tensor.is_floating_point() else -128))
        self.table = torch.zeros(len(lengths), max(*counts, width, 1), dtype=torch.int32)
        self.q, self.k, self.v = [], [], []
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            q, k, v = (
                torch.from_numpy(rng.standard_normal((length, n, head_dim))).to(dtype)
                for n in (heads, kv_heads, kv_heads)
            )
            pages = torch.tensor([next(numbers) for _ in range(count)], dtype=torch.int64)
            self.table[i, :count] = pages.int()
            positions = torch.arange(length)
            put(self.cache, (pages[positions // page_size], positions % page_size), k, v)
            if pages_dtype is not None:
                k, v = (x[:length] for x in get(self.cache, pages, torch.float32))
            self.q.append(q)
            self.k.append(k)
            self.v.append(v)

    def tiling(self, split_tokens: int, part: int, busy: int) -> Tiling:
        """The model's, with smaller pieces and parts, and as many items."""
        how = Tiling.of(self.heads // self.kv_heads, self.dtype, self.head_dim, (self.window,))
        short, long = (each._replace(split=split_tokens, part=part, busy=busy) for _, each in how.classes)
        return how._replace(short=short, long=long)

    def attend(
        self,
        rows: Sequence[Row],
        split_tokens: int = 512,
        spare: int = 0,
        padding: int = 0,
        part: int = 512,
        processors: int = 0,
        late: Sequence[int] = (),
        busy: int = 1 << 20,
    ) -> list[torch.Tensor]:
        """Each row's result [q_len, heads * head_dim], of one step.

        `spare` tokens belong to no row, and `padding` items of each class are none. Both classes have pieces
        of `split_tokens` keys, parts of up to `part` of them, and about `busy` items, if there are more.
        `processors`: see `AttentionRows`. Row i is cut as if it started `late[i]` tokens later than it does.
        """
        asked = [self.q[r.sequence][r.kv_len - r.q_len : r.kv_len] for r in rows]
        tokens = sum(r.q_len for r in rows) + spare
        # As in the model: q is a view into rows that also hold k and v.
        qkv = torch.full((tokens, self.heads + 2 * self.kv_heads, self.head_dim), torch.nan, dtype=self.dtype)
        qkv[: tokens - spare, : self.heads] = torch.cat(asked)
        counts = np.array([r.q_len for r in rows], np.int32)
        starts = np.array([r.kv_len - r.q_len for r in rows], np.int32)
        tables = np.array([r.sequence for r in rows], np.int32) * np.int32(self.table.shape[1])
        tiling = self.tiling(split_tokens, part, busy)
        lates = np.array(late or [0] * len(rows), np.int32)
        arrays = cut(starts + lates, counts, tables, tiling, lates)
        parts = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if padding:
            for name, array in parts.items():
                if "_items" in name:
                    parts[name] = torch.cat([array, torch.full((padding, array.shape[1]), -(2**31)).int()])
                else:
                    parts[name] = torch.cat([array, array[-1:].repeat(padding)])
        work = attention_rows(self.table.flatten(), parts, tiling, processors)[self.window]
        if late:
            self._resolve(work, starts, counts, lates)
        arrivals = new_arrivals(self.kv_heads, self.table.device)
        scale = self.head_dim**-0.5
        queries = qkv[:, : self.heads]
        out = paged_attention(queries, self.cache, work, arrivals, scale, self.cap, self.sinks)
        assert not arrivals.any()
        return list(out.split([*(r.q_len for r in rows), spare])[:-1])

    def _resolve(self, work: AttentionRows, starts: Ints, counts: Ints, lates: Ints) -> None:
        """Correct the work of rows that each follow one which ended earlier than was assumed."""
        numbers = np.arange(1, len(starts) + 1, dtype=np.int32)
        unread = torch.empty(0, dtype=torch.int32)
        columns = dict.fromkeys(HostRows.__slots__, unread) | {
            "owners": torch.from_numpy(numbers.repeat(counts)),
            "follows": torch.from_numpy(numbers),
            "starts": torch.from_numpy(starts + lates),
        }
        items_launch(work, HostRows(**columns), RowEnds(unread, torch.from_numpy(starts))).run()

    def dense(self, row: Row) -> torch.Tensor:
        """The same for one row, in fp64 over contiguous keys."""
        group = self.heads // self.kv_heads
        q, k, v = (x[row.sequence][: row.kv_len].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        seen = torch.ones(row.kv_len, row.kv_len).tril().bool()
        if self.window:
            seen = seen.triu(1 - self.window)
        scores = q[:, -row.q_len :] @ k.transpose(1, 2) * self.head_dim**-0.5
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        scores = scores.masked_fill(~seen[-row.q_len :], -torch.inf)
        if len(self.sinks):
            sinks = self.sinks.double()[:, None, None].expand(-1, row.q_len, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        out = scores.softmax(-1)[..., : row.kv_len] @ v
        return out.transpose(0, 1).flatten(1)
