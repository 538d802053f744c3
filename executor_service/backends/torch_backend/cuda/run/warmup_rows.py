"""Rows that want everything that a row can want, so that one launch of them compiles all kernels."""

from __future__ import annotations

import numpy as np

from executor_service.backends.base import ForwardRow, PromptOutputs
from executor_service.contract.masks import mask_bytes
from executor_service.contract.plan import OutputMode, Sampling

_EVERYTHING = Sampling(
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
    stop_token_ids=(0,),
    min_tokens=1,
)


def rows_of_every_kind(vocab_size: int, slot: int = -1) -> list[ForwardRow]:
    """Rows of one token, whose keys and values go to page 0; with the adapter in `slot`, if one is named."""
    zero = np.zeros(1, np.int32)
    masks = np.full((1, mask_bytes(vocab_size)), 255, np.uint8)

    def row(output: OutputMode, sampling: Sampling, **fields: object) -> ForwardRow:
        outputs = int(output is not OutputMode.HIDDEN)
        return ForwardRow(0, zero, zero, 1, zero, outputs, output, sampling, slot=slot, **fields)  # type: ignore[arg-type]

    prompt = PromptOutputs(first=1, targets=zero, last=True, total=True)
    return [
        row(OutputMode.SAMPLE, Sampling()),
        row(OutputMode.SAMPLE, _EVERYTHING, masks=masks),
        row(OutputMode.TOP_K, Sampling(), top_k=1),
        row(OutputMode.FULL, Sampling()),
        row(OutputMode.HIDDEN, Sampling(), prompt=prompt),
    ]
