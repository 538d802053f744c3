"""Translates the gateway's GenerateRequest into the public one, so that the same checks apply to both."""

from __future__ import annotations

from paceline.scheduler.v1 import scheduler_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb

from scheduler_service.errors import ServiceError, invalid, unsupported

_SEED_BITS = 64
_UNSUPPORTED = (
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
    "kv_transfer_params",
    "kv_transfer_params_json",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
"""Fields of GenerateRequest and SamplingParams whose features are missing here."""
_OPENAI_NAMES = (
    ("stop.strings", "stop"),
    ("stop.token_ids", "stop_token_ids"),
    ("stop.", ""),
    ("sampling.", ""),
    ("grammar.", ""),
    ("inputs[0].token_ids", "input"),
    ("inputs[0]", "input"),
    ("token_ids", "prompt"),
    ("text", "prompt"),
)
"""Beginnings of our fields' names, and what they are to clients of the OpenAI API; the first match counts."""


def public_request(message: worker_pb.GenerateRequest) -> pb.GenerateRequest:
    """The same request to the public API. Raises ServiceError, which names fields as `in_openai_words` does.

    The gateway fills in the model's sampling defaults by itself, so unset numbers mean no filter and no
    penalty here.
    """
    given = message.sampling_params
    set_fields = {field.name for part in (message, given) for field, _ in part.ListFields()}
    for name in _UNSUPPORTED:
        if name in set_fields:
            raise unsupported(name)
    request = pb.GenerateRequest(
        request_id=message.request_id, n=given.n, returns=pb.RETURNS_TOKEN_IDS, stop=_stop(given)
    )
    if message.WhichOneof("input") == "text":
        request.text = message.text
    else:
        request.token_ids.ids.extend(message.tokenized.input_ids)
    _set_sampling(request.sampling, given)
    _set_grammar(request, given)
    return request


def _stop(given: worker_pb.SamplingParams) -> pb.StopConditions:
    stop = pb.StopConditions(
        min_tokens=given.min_tokens,
        strings=given.stop,
        token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
    )
    if given.HasField("max_tokens"):
        stop.max_tokens = given.max_tokens
    return stop


def _set_sampling(sampling: pb.SamplingParams, given: worker_pb.SamplingParams) -> None:
    if given.HasField("temperature"):
        sampling.temperature = given.temperature
    sampling.top_p = given.top_p or 1.0
    sampling.top_k = given.top_k
    sampling.min_p = given.min_p
    sampling.repetition_penalty = given.repetition_penalty or 1.0
    sampling.presence_penalty = given.presence_penalty
    sampling.frequency_penalty = given.frequency_penalty
    if given.HasField("seed"):
        sampling.seed = given.seed % (1 << _SEED_BITS)
    if given.HasField("logprobs"):
        if given.logprobs < 0:
            raise invalid("logprobs", "of all tokens are not returned")
        sampling.logprobs = given.logprobs
    for id_, bias in given.logit_bias.items():
        if id_ < 0:
            raise invalid("logit_bias", f"{id_} is no token id")
        sampling.logit_bias[id_] = bias


def _set_grammar(request: pb.GenerateRequest, given: worker_pb.SamplingParams) -> None:
    match given.WhichOneof("constraint"):
        case "json_schema":
            request.grammar.json_schema = given.json_schema
        case "json_object":
            request.grammar.json_schema = '{"type": "object"}'
        case "regex":
            request.grammar.regex = given.regex
        case "grammar":
            request.grammar.lark = given.grammar
        case "structural_tag":
            request.grammar.structural_tag = given.structural_tag
        case "choice":
            request.grammar.choices.choices.extend(given.choice.choices)


def in_openai_words(error: ServiceError) -> ServiceError:
    """The error, with its field named as in the OpenAI API."""
    field = error.field
    found = next((pair for pair in _OPENAI_NAMES if field.startswith(pair[0])), None)
    if found is None:
        return error
    name = found[1] + field.removeprefix(found[0])
    return ServiceError(
        error.reason,
        error.message.replace(field, name, 1),
        retry_after_s=error.retry_after_s,
        metadata={**error.metadata, "field": name},
    )
