"""Forward: whole inputs without a cache, and the arrays that come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.backends.base import ModelDescription
from executor_service.contract.forward_view import ForwardView
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Reason, Refusal, RequestRefused, TokenIds
from executor_service.rpc.codec.refusals import oversized, refused, unsupported
from executor_service.rpc.codec.tokens import decode_tokens


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A checked request of Forward."""

    inputs: list[TokenIds]
    views: list[ForwardView]  # one per input
    want: frozenset[str]  # of "hidden", "embedding" and "logits"


def decode_forward(request: pb.ForwardRequest, limits: Limits, info: ModelDescription) -> ForwardCall:
    """The inputs, how they are computed, and what is asked for. Raises RequestRefused."""
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
    if "logits" in want and not limits.can_sample:
        raise RequestRefused(Reason.UNSUPPORTED, unsupported("outputs: LOGITS").message)
    lengths = [len(item.tokens) for item in request.inputs]
    if sum(lengths) > limits.max_step_tokens:
        raise oversized(f"inputs: {sum(lengths)} tokens, at most {limits.max_step_tokens} (max_step_tokens)")
    first, count = request.first_token, request.token_count
    returned = [count or length - first for length in lengths]
    for i, length in enumerate(lengths):
        if length and first >= length:
            raise refused(f"first_token: {first}, but inputs[{i}] has {length} tokens")
        if first + count > length:
            raise refused(f"token_count: {count} from {first} on, but inputs[{i}] has {length} tokens")
    width = info.hidden_size * ("hidden" in want) + limits.vocab_size * ("logits" in want)
    size = 4 * (width * sum(returned) + info.hidden_size * len(lengths) * ("embedding" in want))
    if size > limits.max_full_logits_bytes:
        raise oversized(
            f"outputs: {size} bytes, at most {limits.max_full_logits_bytes} (max_full_logits_bytes); "
            "first_token and token_count choose some of the tokens"
        )
    inputs, views = [], []
    for i, item in enumerate(request.inputs):
        tokens = decode_tokens(f"inputs[{i}].tokens", item.tokens, limits)
        if isinstance(tokens, Refusal):
            raise RequestRefused(tokens.reason, tokens.message)
        inputs.append(tokens)
        views.append(_view(f"inputs[{i}]", item, first, count, limits, info))
    return ForwardCall(inputs, views, want)


def _view(
    where: str, item: pb.ForwardInput, first: int, count: int, limits: Limits, info: ModelDescription
) -> ForwardView:
    """How an input is computed. Raises RequestRefused."""
    tokens = len(item.tokens)
    for field in ("position_ids", "attention_mask"):
        if getattr(item, field) and not info.can_mask_forward:
            raise RequestRefused(Reason.UNSUPPORTED, unsupported(f"{where}.{field}").message)
    positions = mask = None
    if item.position_ids:
        if len(item.position_ids) != tokens:
            raise refused(f"{where}.position_ids: {len(item.position_ids)}, but it has {tokens} tokens")
        if max(item.position_ids) >= limits.context_length:
            raise refused(f"{where}.position_ids: all are below {limits.context_length} (context_length)")
        positions = np.array(item.position_ids, np.int32)
    if item.attention_mask:
        size = len(item.attention_mask)
        if size not in (tokens, tokens * tokens):
            raise refused(f"{where}.attention_mask: {tokens} or {tokens * tokens} bytes, not {size}")
        mask = np.frombuffer(item.attention_mask, np.uint8) != 0
        mask = mask if size == tokens else mask.reshape(tokens, tokens)
    view = ForwardView(first, count, positions, mask)
    if (blind := view.blind(tokens, info.attention_window)) >= 0:
        raise refused(f"{where}.attention_mask: token {blind} sees none of the tokens up to itself")
    return view


def encode_tensor(array: NDArray[np.float32]) -> pb.Tensor:
    """An array as a message: little-endian fp32, row-major."""
    return pb.Tensor(shape=array.shape, data=np.ascontiguousarray(array, "<f4").tobytes())
