"""Forward: whole inputs without a cache, and the arrays that come back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.limits import Limits
from executor_service.contract.plan import Reason, Refusal, RequestRefused, TokenIds
from executor_service.rpc.codec.refusals import oversized, refused, unsupported
from executor_service.rpc.codec.tokens import decode_tokens


def decode_forward(
    request: pb.ForwardRequest, limits: Limits, hidden_size: int
) -> tuple[list[TokenIds], frozenset[str]]:
    """The inputs, and which of "hidden", "embedding" and "logits" are asked for. Raises RequestRefused."""
    if not 1 <= len(request.inputs) <= limits.max_rows:
        raise oversized(f"inputs: 1 to {limits.max_rows} (max_rows), not {len(request.inputs)}")
    names = {
        pb.FORWARD_OUTPUT_HIDDEN: "hidden",
        pb.FORWARD_OUTPUT_EMBEDDING: "embedding",
        pb.FORWARD_OUTPUT_LOGITS: "logits",
    }
    if not request.outputs or not all(output in names for output in request.outputs):
        raise refused("outputs: at least one of HIDDEN, EMBEDDING and LOGITS, and nothing else")
    want = frozenset(names[output] for output in request.outputs)
    for field in ("first_token", "token_count"):
        if getattr(request, field):
            raise RequestRefused(Reason.UNSUPPORTED, unsupported(field).message)
    for i, item in enumerate(request.inputs):
        for field in ("position_ids", "attention_mask"):
            if getattr(item, field):
                raise RequestRefused(Reason.UNSUPPORTED, unsupported(f"inputs[{i}].{field}").message)
    lengths = [len(item.tokens) for item in request.inputs]
    if sum(lengths) > limits.max_step_tokens:
        raise oversized(f"inputs: {sum(lengths)} tokens, at most {limits.max_step_tokens} (max_step_tokens)")
    width = hidden_size * ("hidden" in want) + limits.vocab_size * ("logits" in want)
    size = 4 * (width * sum(lengths) + hidden_size * len(lengths) * ("embedding" in want))
    if size > limits.max_full_logits_bytes:
        raise oversized(
            f"outputs: {size} bytes, at most {limits.max_full_logits_bytes} (max_full_logits_bytes)"
        )
    inputs = []
    for i, item in enumerate(request.inputs):
        tokens = decode_tokens(f"inputs[{i}].tokens", item.tokens, limits)
        if isinstance(tokens, Refusal):
            raise RequestRefused(tokens.reason, tokens.message)
        inputs.append(tokens)
    return inputs, want


def encode_tensor(array: NDArray[np.float32]) -> pb.Tensor:
    """An array as a message: little-endian fp32, row-major."""
    return pb.Tensor(shape=array.shape, data=np.ascontiguousarray(array, "<f4").tobytes())
