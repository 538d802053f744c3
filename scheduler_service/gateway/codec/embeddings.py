"""Embed of the worker protocol: one input of token ids, and its vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.scheduler.v1 import scheduler_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb

from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.adapters import AdapterNames
from scheduler_service.rpc.codec.embed import EmbedTask
from scheduler_service.streams.evaluation import EvaluatedInput


class WorkerEmbedTask(EmbedTask):
    """A checked EmbedRequest of the gateway: the public one with its input, and a reply of the gateway's."""

    def __init__(self, message: worker_pb.EmbedRequest, model: ServedModel, adapters: AdapterNames) -> None:
        """Raises ServiceError, which names fields as `in_openai_words` does."""
        tokens = pb.TokenIds(ids=message.tokenized.input_ids)
        request = pb.EmbedRequest(request_id=message.request_id, inputs=[pb.EmbedInput(token_ids=tokens)])
        super().__init__(request, model, adapters)

    def response(
        self,
        results: Sequence[EvaluatedInput],
        usage: pb.InputUsage,  # noqa: ARG002
    ) -> Iterator[bytes]:
        """See `EvaluationTask`."""
        for vector, tokens in self.vectors(results):
            yield worker_pb.EmbedResponse(
                embedding=vector.tolist(), prompt_tokens=tokens, embedding_dim=len(vector)
            ).SerializeToString()
