# ruff: noqa: N802  RPC names are the proto's
"""Evaluations of a fake scheduler: functions of the texts' lengths; refused or lost by a script."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb

EvaluationMessage = pb.ScoreRequest | pb.EmbedRequest | pb.RerankRequest
USAGE = pb.InputUsage(prompt_tokens=9, cached_tokens=3, queue_ms=1, total_ms=2)


class FakeEvaluations:
    """A text is its UTF-8 bytes; a token's logprob is -0.5; a vector begins with the number of tokens."""

    def __init__(self) -> None:
        self.evaluations: list[EvaluationMessage] = []
        self.endings: list[Callable[[Any], Awaitable[None]]] = []  # of the next calls, in place of a reply

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        await self._see(request, context)
        return pb.ScoreResponse(
            request_id=request.request_id,
            scores=[_score(request, one) for one in request.inputs],
            usage=USAGE,
        )

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        await self._see(request, context)
        size = request.dimensions or 4
        found = [len(one.text.encode()) or len(one.token_ids.ids) for one in request.inputs]
        vectors = [pb.Embedding(values=[count] + [0.5] * (size - 1), tokens=count) for count in found]
        return pb.EmbedResponse(request_id=request.request_id, embeddings=vectors, usage=USAGE)

    async def Rerank(self, request: pb.RerankRequest, context: Any) -> pb.RerankResponse:
        await self._see(request, context)
        best = sorted(
            range(len(request.documents)), key=lambda index: (-len(request.documents[index]), index)
        )
        ranked = [
            pb.RankedDocument(index=index, score=1 - 1 / (2 + len(request.documents[index])))
            if request.documents[index]
            else pb.RankedDocument(index=index, empty=True)
            for index in best[: request.top_n or None]
        ]
        return pb.RerankResponse(request_id=request.request_id, results=ranked, usage=USAGE)

    async def _see(self, request: EvaluationMessage, context: Any) -> None:
        self.evaluations.append(request)
        if self.endings:
            await self.endings.pop(0)(context)


class FakeAdapters:
    """Adapters of a fake scheduler."""

    def __init__(self) -> None:
        self.loaded: dict[str, admin_pb2.LoadedAdapter] = {}

    async def LoadAdapter(self, request: admin_pb2.LoadAdapterRequest, context: Any) -> Any:
        adapter = admin_pb2.LoadedAdapter(
            name=request.name, fingerprint=request.path.encode(), rank=4, bytes=1000, requests=7
        )
        self.loaded[request.name] = adapter
        return admin_pb2.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(self, request: admin_pb2.UnloadAdapterRequest, context: Any) -> Any:
        known = self.loaded.pop(request.name, None) is not None
        return admin_pb2.UnloadAdapterResponse(unloaded=known)

    async def ListAdapters(self, request: admin_pb2.ListAdaptersRequest, context: Any) -> Any:
        return admin_pb2.ListAdaptersResponse(adapters=self.loaded.values())


def _score(request: pb.ScoreRequest, given: pb.ScoreInput) -> pb.Score:
    ids = list(given.text.encode()) or list(given.token_ids.ids)
    ids = ids if given.HasField("prompt") else ids[1:]
    one = pb.TokenLogprobs(logprob=-0.5)
    for top in range(request.top_logprobs):
        one.top_ids.append(ord("A") + top)
        one.top_logprobs.append(-0.5 - top)
    count = len(ids)
    return pb.Score(token_ids=ids, logprobs=[one] * count, logprob=-0.5 * count, perplexity=1.5)
