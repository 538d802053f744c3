"""Picking tokens on the device: `sampler`'s choice for rows without penalties, in two Triton kernels.

The first kernel surveys each row of logits in chunks, side by side: are all of them finite, and which token
has the largest logit with noise (at temperature 0, without)? That token is the answer unless the row has
filters. The second kernel, one program for each row, then applies them as `drawing.draw` describes: it counts
and weighs the tokens that are likelier than the chosen one, and where those fill the kept prefix already, it
chooses among them the one with the largest logit with noise instead. Where top-p applies to what top-k
leaves, bounds close in on the k-th likeliest token. Nothing is sorted.

**The token is the one that `drawing.draw` picks**, as far as arithmetic allows: hash, division by the
temperature, order, ties and counts are the same to the bit, and no result depends on the other rows or their
number. The last bits of exp and log may differ, which are the device's own (as between any two devices), and
the last bits of sums: fp32 weights are summed in fp64 here as there, in another order. So a token can differ
where two noisy values are that close, or where the mass before a token equals that of the nucleus (or the
token's weight equals min_p) to within 1e-6 of it.

Cost: the survey reads a row once (4 bytes x vocabulary), and so does each pass over a filtered row: one pass
for top-k or min-p alone, two for top-p, three to five for both (20 more where k is in the thousands), and two
for each token that is not kept, of which there are ln(1 / kept share of the mass) on average. The survey of a
row has vocabulary / CHUNK programs, a pass has one. At batch 1 a pass takes as long as one multiprocessor
needs to compute exp for every token (or noise, where a pass looks for another token): by its number of
instructions some 20 us (100 us with noise) for 151,936 tokens on an H100. Memory is not the limit: the row is
in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch, power_of_two
from executor_service.backends.torch_backend.cuda.layout.step_buffer import PickRows
from executor_service.backends.torch_backend.cuda.picking.likelihood import (
    first_largest,
    gumbel_noise,
    noisiest,
    top_k_mass,
    weigh,
)

CHUNK = 4096  # tokens of one program of the survey
_SURVEY_TILE, _PICK_TILE = 1024, 4096  # tokens read at once
# Parameters that are views into larger tensors: Triton must not compile for their present alignment.
_VIEWS = (
    "temperatures", "key_lows", "key_highs", "top_ks", "top_ps", "min_ps",
    "best_values", "best_tokens", "highest_logits", "finites", "out_tokens", "out_finite",
)  # fmt: skip


@triton.jit(do_not_specialize=_VIEWS)
def _survey_kernel(
    best_values, best_tokens, highest_logits, finites, logits, temperatures, key_lows, key_highs,
    vocabulary, stride, chunk: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the chunk's noisiest token, its largest logit, and whether all are finite."""
    begin_kernel()
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    low = tl.load(key_lows + row).to(tl.uint32, bitcast=True)
    high = tl.load(key_highs + row).to(tl.uint32, bitcast=True)
    source = logits + row.to(tl.int64) * stride
    lane, begin = tl.arange(0, tile), tl.program_id(1) * chunk
    values, tokens = tl.full([tile], float("-inf"), tl.float32), begin + lane
    highest, finite = values, tl.full([tile], 1, tl.int32)
    for first in range(begin, tl.minimum(begin + chunk, vocabulary), tile):
        token = first + lane
        live = token < vocabulary
        logit = tl.load(source + token, mask=live, other=float("-inf"))
        value = logit
        if temperature != 0:
            value = tl.div_rn(logit, temperature) + gumbel_noise(low, high, token)
        better = value > values
        values, tokens = tl.where(better, value, values), tl.where(better, token, tokens)
        highest = tl.maximum(highest, logit)
        finite = finite & ((tl.abs(logit) < float("inf")) | (token >= vocabulary)).to(tl.int32)
    best, chosen = first_largest(values, tokens, vocabulary)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_values + place, best)
    tl.store(best_tokens + place, chosen)
    tl.store(highest_logits + place, tl.max(highest, 0))
    tl.store(finites + place, tl.min(finite, 0))


@triton.jit(do_not_specialize=_VIEWS)
def _pick_kernel(
    out_tokens, out_finite, best_values, best_tokens, highest_logits, finites, logits,
    temperatures, key_lows, key_highs, top_ks, top_ps, min_ps, vocabulary, stride,
    chunks: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (row): the noisiest token of all chunks, then the noisiest that the filters keep."""
    begin_kernel()
    row = tl.program_id(0)
    column = tl.arange(0, columns)
    place, live = row * chunks + column, column < chunks
    values = tl.load(best_values + place, mask=live, other=float("-inf"))
    tokens = tl.load(best_tokens + place, mask=live, other=vocabulary)
    _, chosen = first_largest(values, tokens, vocabulary)
    tl.store(out_finite + row, tl.min(tl.load(finites + place, mask=live, other=1), 0))
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row).to(tl.float64)
    some = (top_k > 0) & (top_k < vocabulary)
    if (temperature != 0) & (some | (top_p < 1) | (min_p > 0)):
        k = tl.where(some, top_k, vocabulary)
        source = logits + row.to(tl.int64) * stride
        low = tl.load(key_lows + row).to(tl.uint32, bitcast=True)
        high = tl.load(key_highs + row).to(tl.uint32, bitcast=True)
        highest = tl.max(tl.load(highest_logits + place, mask=live, other=float("-inf")), 0)
        highest = tl.div_rn(highest, temperature)
        nucleus = tl.full([], float("inf"), tl.float64)
        if top_p < 1:
            if some:
                nucleus = top_p * top_k_mass(source, vocabulary, temperature, highest, k, tile)
            else:
                _, total, _ = weigh(
                    source, vocabulary, temperature, highest, float("-inf"), vocabulary, tile
                )  # fmt: skip
                nucleus = top_p * total
        z = tl.div_rn(tl.load(source + chosen), temperature)
        count, mass, _ = weigh(source, vocabulary, temperature, highest, z, chosen, tile)
        weight = tl.exp(z - highest).to(tl.float64)
        while (count > 0) & ((count >= k) | (mass >= nucleus) | (weight < min_p)):
            chosen = noisiest(source, vocabulary, temperature, low, high, z, chosen, tile)
            z = tl.div_rn(tl.load(source + chosen), temperature)
            count, mass, _ = weigh(source, vocabulary, temperature, highest, z, chosen, tile)
            weight = tl.exp(z - highest).to(tl.float64)
    tl.store(out_tokens + row, chosen)


def pick(logits: torch.Tensor, rows: PickRows, out_tokens: torch.Tensor, out_finite: torch.Tensor) -> None:
    """The token of each row of logits, and whether all of the row's logits are finite (1) or not (0).

    logits fp32 [rows, vocabulary] with contiguous tokens; out_tokens, out_finite int32 [rows], contiguous. A
    row with NaN or infinity gets some id below the vocabulary's size. Where its only such logits are -inf
    (masked tokens), the id is the right one. Raises ValueError.

    All arguments are on the device, nothing is read back, and allocations follow from shapes: a CUDA graph
    can capture this after a call of the same shapes outside of it has compiled both kernels.
    """
    for launch in pick_launches(logits, rows, out_tokens, out_finite):
        launch.run()


def pick_launches(
    logits: torch.Tensor, rows: PickRows, out_tokens: torch.Tensor, out_finite: torch.Tensor
) -> Iterator[Launch]:
    """The launches of `pick`, in their order. Raises ValueError."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError("logits have to be fp32 [rows, vocabulary] with contiguous tokens")
    count, vocabulary = logits.shape
    fp32, int32 = (rows.temperatures, rows.top_ps, rows.min_ps), (rows.key_lows, rows.key_highs, rows.top_ks)
    for dtype, fields in ((torch.float32, fp32), (torch.int32, (*int32, out_tokens, out_finite))):
        if any(x.dtype != dtype or x.shape != (count,) or not x.is_contiguous() for x in fields):
            raise ValueError(f"some parameter or result of {count} rows is not contiguous {dtype} [{count}]")
    chunks = -(-vocabulary // CHUNK)
    best_values, highest_logits = torch.empty(2, count, chunks, dtype=torch.float32, device=logits.device)
    best_tokens, finites = torch.empty(2, count, chunks, dtype=torch.int32, device=logits.device)
    survey = {
        "best_values": best_values, "best_tokens": best_tokens, "highest_logits": highest_logits,
        "finites": finites, "logits": logits, "temperatures": rows.temperatures, "key_lows": rows.key_lows,
        "key_highs": rows.key_highs, "vocabulary": vocabulary, "stride": logits.stride(0),
    }  # fmt: skip
    yield Launch(
        _survey_kernel, (count, chunks, 1), survey, {"chunk": CHUNK, "tile": _SURVEY_TILE}, warps=8, stages=1
    )
    yield Launch(
        _pick_kernel,
        (count, 1, 1),
        survey
        | {
            "out_tokens": out_tokens, "out_finite": out_finite, "top_ks": rows.top_ks,
            "top_ps": rows.top_ps, "min_ps": rows.min_ps,
        },
        {"chunks": chunks, "columns": power_of_two(chunks), "tile": _PICK_TILE},
        warps=32,
        stages=1,
    )  # fmt: skip
