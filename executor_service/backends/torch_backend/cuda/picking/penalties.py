"""Penalties on the device, in two Triton kernels: count what a history holds, and change its tokens' logits.

The history of an output are the tokens up to its own position, read from `TokenPages`. Its counts exist while
its logits do: they are made from the pages in each step, which costs far less than the row's attention to
the same pages, and there is no state that could differ from the sequence's.

**The logits are those that `sampler` makes on CPU**, to the bit: each product and difference is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Arguments, Launch

_HISTORY_TILE, _HISTORY_PROGRAMS = 1024, 16  # tokens read at once; programs that share an output's history
_TILE = 1024  # tokens of the vocabulary of one program
_VIEWS = (
    "tables", "table_begins", "lengths", "prompt_lengths", "repetitions", "presences", "frequencies",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Histories:
    """The history and the penalties of some outputs: device tensors, [outputs] each unless noted."""

    tables: torch.Tensor  # int32: block tables, concatenated
    table_begins: torch.Tensor  # int32: where each output's is
    lengths: torch.Tensor  # int32, in tokens; 0: no penalties
    prompt_lengths: torch.Tensor  # int32: the tokens after these are output
    repetitions: torch.Tensor  # fp32; 1: off
    presences: torch.Tensor  # fp32; 0: off
    frequencies: torch.Tensor  # fp32; 0: off


@triton.jit(do_not_specialize=_VIEWS)
def _count_kernel(
    counts, ids, tables, table_begins, lengths, prompt_lengths, repetitions, vocabulary,
    page_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (output, share of its history): count each token, 2 for one of the output and 1 for any other.

    Those of the prompt set a bit, so that the count divided by 2 is that of the output.
    """
    begin_kernel()
    output, lane = tl.program_id(0), tl.arange(0, tile)
    length, prompt = tl.load(lengths + output), tl.load(prompt_lengths + output)
    table = tables + tl.load(table_begins + output)
    target = counts + output.to(tl.int64) * vocabulary
    # Without a repetition penalty the prompt does not matter.
    begin = tl.where(tl.load(repetitions + output) == 1, prompt, 0)
    for first in range(begin + tl.program_id(1) * tile, length, tl.num_programs(1) * tile):
        place = first + lane
        live = place < length
        page = tl.load(table + place // page_size, mask=live, other=0).to(tl.int64)
        token = tl.load(ids + page * page_size + place % page_size, mask=live, other=-1)
        live = live & (token >= 0) & (token < vocabulary)
        tl.atomic_add(target + token, 2, mask=live & (place >= prompt), sem="relaxed")
        tl.atomic_or(target + token, 1, mask=live & (place < prompt), sem="relaxed")


@triton.jit
def _product(a, b):
    """a * b in fp32, rounded by itself: the compiler can't fuse it with a sum."""
    return (a.to(tl.float64) * b.to(tl.float64)).to(tl.float32)


@triton.jit(do_not_specialize=_VIEWS)
def _penalize_kernel(
    logits, counts, repetitions, presences, frequencies, vocabulary, stride, tile: tl.constexpr
):  # fmt: skip
    """Program (output, tile of tokens): the penalties of the tokens that were counted."""
    begin_kernel()
    output, token = tl.program_id(0), tl.program_id(1) * tile + tl.arange(0, tile)
    live = token < vocabulary
    count = tl.load(counts + output.to(tl.int64) * vocabulary + token, mask=live, other=0)
    target = logits + output.to(tl.int64) * stride + token
    seen = count > 0
    logit = tl.load(target, mask=seen, other=0.0)
    repetition = tl.load(repetitions + output)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition), _product(logit, repetition))
    in_output = count >> 1
    lowered = logit - tl.load(presences + output)
    lowered -= _product(tl.load(frequencies + output), in_output.to(tl.float32))
    tl.store(target, tl.where(in_output > 0, lowered, logit), mask=seen)


def penalty_launches(
    logits: torch.Tensor, ids: torch.Tensor, histories: Histories, counts: torch.Tensor
) -> Iterator[Launch]:
    """The launches that change logits, in place. Nothing is read back.

    logits fp32 [outputs, vocabulary] with contiguous tokens; ids: those of `TokenPages`; counts int32
    [outputs, vocabulary], zeros, overwritten.
    """
    outputs, vocabulary = logits.shape
    history: Arguments = {
        "tables": histories.tables, "table_begins": histories.table_begins, "lengths": histories.lengths,
        "prompt_lengths": histories.prompt_lengths,
    }  # fmt: skip
    yield Launch(
        _count_kernel,
        (outputs, _HISTORY_PROGRAMS, 1),
        history
        | {
            "counts": counts, "ids": ids, "repetitions": histories.repetitions, "vocabulary": vocabulary,
        },
        {"page_size": ids.shape[1], "tile": _HISTORY_TILE},
        warps=4,
        stages=1,
    )  # fmt: skip
    yield Launch(
        _penalize_kernel,
        (outputs, -(-vocabulary // _TILE), 1),
        {
            "logits": logits, "counts": counts, "repetitions": histories.repetitions,
            "presences": histories.presences, "frequencies": histories.frequencies,
            "vocabulary": vocabulary, "stride": logits.stride(0),
        },
        {"tile": _TILE},
        warps=4,
        stages=1,
    )  # fmt: skip
