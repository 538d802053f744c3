"""Masks on the device, in one Triton kernel: the logits of what a mask does not allow become -inf."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch

_TILE = 1024  # tokens of a program


@triton.jit(do_not_specialize=("words", "places"))
def _exclude_kernel(logits, words, places, vocabulary, stride, width, tile: tl.constexpr):
    """Program (mask, tile of tokens): exclude those whose bits are 0."""
    begin_kernel()
    mask, token = tl.program_id(0), tl.program_id(1) * tile + tl.arange(0, tile)
    live = token < vocabulary
    word = tl.load(words + mask * width + token // 32, mask=live, other=-1)
    excluded = live & ((word >> (token % 32)) & 1 == 0)
    target = logits + tl.load(places + mask).to(tl.int64) * stride + token
    tl.store(target, tl.full([tile], float("-inf"), tl.float32), mask=excluded)


def exclude_launch(logits: torch.Tensor, words: torch.Tensor, places: torch.Tensor) -> Launch:
    """Set logits[places] to -inf where the masks do not allow the token, in place.

    logits fp32 [rows, vocabulary] with contiguous tokens; words int32 [masks, width], contiguous: masks as in
    `contract.masks`; places int32 [masks]: the row of each. Nothing is read back.
    """
    vocabulary = logits.shape[1]
    return Launch(
        _exclude_kernel,
        (len(words), -(-vocabulary // _TILE), 1),
        {
            "logits": logits, "words": words, "places": places, "vocabulary": vocabulary,
            "stride": logits.stride(0), "width": words.shape[1],
        },
        {"tile": _TILE},
        warps=4,
        stages=1,
    )  # fmt: skip
