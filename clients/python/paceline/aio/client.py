"""The asyncio client of schedulers."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Self, Unpack

from paceline import requests, responses
from paceline.aio.administration import Administration
from paceline.aio.connections import SchedulerConnections
from paceline.aio.generation import Generation
from paceline.channel import Security
from paceline.chat import Message, MessageLike
from paceline.directory import DirectoryUse
from paceline.environment import addresses_or_default, security_or_default
from paceline.evaluation_replies import embed_reply, rerank_reply, score_reply
from paceline.evaluation_requests import embed_request, rerank_request, score_request
from paceline.evaluations import (
    EmbedInputLike,
    EmbedReply,
    EvaluationOptions,
    PoolingName,
    RerankMethodName,
    RerankReply,
    ScoreInputLike,
    ScoreReply,
)
from paceline.failover import FAILOVER_TIMEOUT_S
from paceline.pieces import Vocabulary
from paceline.requests import Options
from paceline.resume import ResumableStream, identified
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.schemas import Parsed
from paceline.steps import Step, steps_of
from paceline.types import Aborted, Completion, ModelInfo, Status, Waits

_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class Client(Administration):
    """One scheduler, or several that serve the same model. Use as an async context manager, or `close()` it.

        async with Client("127.0.0.1:50051") as client:
            async for event in client.generate("Once upon a time", max_tokens=64):
                ...

    `addresses` is a sequence, or one comma-separated string. Calls are spread over the addresses, and over
    all schedulers of an address that is a DNS name; a call that one scheduler refuses is tried on the
    others. A stream whose scheduler dies is continued without a gap on another one, or on the same one
    after its restart; it raises StreamLost if that does not succeed within `failover_timeout_s`.
    A call that needs a model waits for one that is loading, for as long. While a call waits for a scheduler
    that goes on with it, the logger "paceline" says so at INFO.

    Where the schedulers have a directory, the client learns of others with the same model, and spreads its
    calls over them too. `directory` says of which: "safe", over TLS by the authority of `security`, or on
    loopback; "any", also without TLS elsewhere if `security` has no authority; "off", of none. Calls to "all
    schedulers" go to those known when they begin; the first such call looks into a directory before.

    Without `addresses`, PACELINE_ADDRESS is used, else 127.0.0.1:50051; without `security`, PACELINE_TOKEN
    and PACELINE_TLS_CA, _CERT and _KEY. `Security()` is neither token nor TLS.

    `model`: of several models at an address, the one that all calls mean which name none.

    `extra_streams`: calls that a scheduler may have beyond 1.25 of the mean before it passes on those whose
    beginning it has cached. Of few calls at once, chance alone gives one of several schedulers that much more
    than the others, and a long queue there costs less than computing the prompts anew elsewhere.

    A request has exactly one of `prompt` (text, without a chat template), `messages` (formatted with the
    model's chat template) and `token_ids`. `timeout_s` is the deadline of all attempts of a call together,
    which the scheduler enforces too; None: no deadline. All calls raise `paceline.errors`.

    `complete`, `completions`, `chat`, `score`, `embed` and `rerank` may be sent again without harm, and are,
    on another scheduler or the same one, for `failover_timeout_s` after their scheduler was lost.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] | None = None,
        *,
        security: Security | None = None,
        failover_timeout_s: float = FAILOVER_TIMEOUT_S,
        directory: DirectoryUse = "safe",
        model: str = "",
        extra_streams: int = 0,
    ) -> None:
        self._schedulers = SchedulerConnections(
            addresses_or_default(addresses),
            security_or_default(security),
            failover_timeout_s,
            directory,
            model,
            extra_streams,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the schedulers that are used now: the given ones, then those learned from a directory."""
        return self._schedulers.addresses

    @property
    def failover_timeout_s(self) -> float:
        """Seconds for which a call that generates is tried again after its scheduler was lost."""
        return self._schedulers.failover_timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channels; calls under way are cancelled, and later ones raise RuntimeError."""
        await self._schedulers.close()

    def view(self, token: str = "", metadata: Mapping[str, str] = _NO_METADATA) -> Self:
        """A client of the same channels whose calls have another token, and further metadata.

        For a program that calls on behalf of others: each call has the identity of whoever has the token; ""
        sends none. Names of metadata are in lower case. Closing a view closes the client. Raises ValueError
        for a token that is not ASCII without spaces.
        """
        view = copy.copy(self)
        view._schedulers = self._schedulers.view((*Security(token=token).metadata, *metadata.items()))
        return view

    async def is_serving(self, *, timeout_s: float | None = None) -> bool:
        """Whether a scheduler takes requests, by its health check, for which callers need no token."""
        return await self._schedulers.is_serving(timeout_s)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options[Parsed]],
    ) -> Generation[Parsed]:
        """Start generating. Iterating over the result yields Delta and Finished events."""
        request = self._schedulers.named(requests.generate_request(prompt, messages, token_ids, options))
        stream = ResumableStream(identified(request))
        key = self._schedulers.affinity(request, options)
        return Generation(self._schedulers, stream, timeout_s, options.get("schema"), key)

    async def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options[Parsed]],
    ) -> Completion[Parsed]:
        """Generate, and wait until the completion has finished. Raises InvalidRequest for an `n` above 1."""
        requests.check_single(options)
        [completion] = await self.completions(
            prompt, messages=messages, token_ids=token_ids, timeout_s=timeout_s, **options
        )
        return completion

    async def completions(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options[Parsed]],
    ) -> list[Completion[Parsed]]:
        """Generate `n` completions, and wait until all have finished; returns them ordered by index."""
        request = identified(requests.generate_request(prompt, messages, token_ids, options))
        reply = await self._schedulers.call(
            lambda endpoint: endpoint.scheduler.GenerateUnary,
            pb.GenerateUnaryRequest(request=request),
            timeout_s,
            self._schedulers.failover_timeout_s,
            self._schedulers.affinity(request, options),
        )
        return responses.completions(reply, max(request.n, 1), options.get("schema"))

    async def chat(
        self,
        messages: str | Sequence[MessageLike],
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options[Parsed]],
    ) -> Completion[Parsed]:
        """The model's answer to a conversation, or to one message of the user's."""
        turns = [Message("user", messages)] if isinstance(messages, str) else messages
        return await self.complete(messages=turns, timeout_s=timeout_s, **options)

    async def score(
        self,
        inputs: Sequence[ScoreInputLike],
        *,
        top_logprobs: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[EvaluationOptions],
    ) -> ScoreReply:
        """Logprobs and perplexity of texts, or of what follows prompts. Nothing is generated.

        `top_logprobs`: number of most likely ids at each token too; 0: none. Raises InvalidRequest for inputs
        that are empty, too long, more than `limits.max_inputs`, or whose reply would be too large;
        Unsupported if the model can't score.
        """
        request = score_request(inputs, top_logprobs, options)
        reply = await self._schedulers.call(
            lambda endpoint: endpoint.scheduler.Score,
            request,
            timeout_s,
            self._schedulers.failover_timeout_s,
        )
        return score_reply(reply, request)

    async def embed(
        self,
        inputs: Sequence[EmbedInputLike],
        *,
        pooling: PoolingName | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[EvaluationOptions],
    ) -> EmbedReply:
        """A vector for each text, [inputs][dimensions].

        `pooling`: "last", "mean" or "cls". `dimensions`: number of values kept, the first ones (default: all
        `ModelInfo.embedding_size`); with `normalize` vectors are then scaled to length 1. `prompt` is a text
        before each of `inputs` that is text, `prompt_name` the name of one of the model's own. Defaults are
        the model's own: `ModelInfo.embedding`. Raises InvalidRequest as `score` does; Unsupported if the
        model gives no vectors.
        """
        request = embed_request(
            inputs,
            options,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prompt=prompt,
            prompt_name=prompt_name,
        )
        reply = await self._schedulers.call(
            lambda endpoint: endpoint.scheduler.Embed,
            request,
            timeout_s,
            self._schedulers.failover_timeout_s,
        )
        return embed_reply(reply, request)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        method: RerankMethodName | None = None,
        instruction: str | None = None,
        top_n: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[EvaluationOptions],
    ) -> RerankReply:
        """Documents in the order of how well they answer a query, best first.

        `method`: "yes_no" (the default; for models trained to judge so, as Qwen3-Reranker, with a chat
        template) or "likelihood", for any model. `instruction` says what makes a document fit. `top_n`:
        how many are returned, the best; 0: all. Raises InvalidRequest as `score` does; Unsupported if the
        model can't score.
        """
        request = rerank_request(query, documents, method, instruction, top_n, options)
        reply = await self._schedulers.call(
            lambda endpoint: endpoint.scheduler.Rerank,
            request,
            timeout_s,
            self._schedulers.failover_timeout_s,
        )
        return rerank_reply(reply, request)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids that `generate` would use for a text or for messages.

        Without `add_special_tokens`, a text gets none of the tokens that the tokenizer puts around one.
        """
        request = requests.tokenize_request(text, messages, add_special_tokens=add_special_tokens)
        return list(
            (
                await self._schedulers.call(lambda endpoint: endpoint.scheduler.Tokenize, request, timeout_s)
            ).token_ids
        )

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of token ids."""
        request = requests.detokenize_request(token_ids)
        return (
            await self._schedulers.call(lambda endpoint: endpoint.scheduler.Detokenize, request, timeout_s)
        ).text

    async def vocabulary(self, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """The bytes of each token, by id: what it adds to a text, or the text that spells a control token.

        Bytes of one token need not be whole characters. They take a call for each mebibyte, and are the same
        as long as the model is: keep them. Raises NotFound if the model has no tokenizer.
        """
        pieces = Vocabulary()
        while not pieces.is_complete:
            request = pb.GetVocabularyRequest(first_id=len(pieces.tokens))
            pieces.add(
                await self._schedulers.call(lambda one: one.scheduler.GetVocabulary, request, timeout_s)
            )
        return tuple(pieces.tokens)

    async def abort(self, request_ids: Iterable[str], *, timeout_s: float | None = None) -> Aborted:
        """End requests of this identity, on all schedulers. Unknown ids are no error.

        Raises if no scheduler answered.
        """
        ids = list(request_ids)
        request = pb.AbortRequest(request_ids=ids)
        replies = await self._schedulers.call_each(lambda one: one.scheduler.Abort, request, timeout_s)
        return responses.aborted(ids, replies)

    async def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """The model, and the limits of requests."""
        request = pb.GetModelInfoRequest()
        return responses.model_info(
            await self._schedulers.call(lambda endpoint: endpoint.scheduler.GetModelInfo, request, timeout_s)
        )

    async def models(self, *, timeout_s: float | None = None) -> dict[str, str]:
        """The models that requests here may name, with their states ("available": not loaded)."""
        if found := responses.models_here(await self._schedulers.entries(timeout_s)):
            return found
        return {(await self.model_info(timeout_s=timeout_s)).name: "serving"}

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """The live counters of one scheduler that answers."""
        request = pb.GetStatusRequest()
        return responses.status(
            await self._schedulers.call(lambda endpoint: endpoint.scheduler.GetStatus, request, timeout_s)
        )

    async def why(
        self,
        request_id: str | None = None,
        *,
        identity: str = "",
        all_identities: bool = False,
        timeout_s: float | None = None,
    ) -> Waits:
        """Where a request of this identity is, what it waits for, and what would end that, on all schedulers.

        Without `request_id`: all that have waited for longer than twice their predicted wait, and than a
        second. "…" and at least 8 characters ask for all whose ids end so; with "…" after them, begin so.
        Ids that are not known are left out; ended ones are for an hour. Administrators may ask for
        another `identity`, or for `all_identities`; all others get Unauthenticated for that.
        """
        request = requests.why_request(request_id, identity, all_identities=all_identities)
        return responses.why(
            await self._schedulers.call_each(lambda one: one.scheduler.WhyWaiting, request, timeout_s)
        )

    def steps(self, *, last_s: float = 0.0, timeout_s: float | None = None) -> AsyncIterator[Step]:
        """What each step of the first address's scheduler did: from `last_s` seconds ago on, and as it comes.

        Other identities' requests are numbers, but for administrators.
        """
        request = requests.steps_request(last_s)
        return self._schedulers.stream(
            lambda one: one.scheduler.WatchSteps, request, timeout_s, lambda reply: steps_of(reply.log)
        )

    def step_logs(
        self,
        *,
        first_step: int = 0,
        last_s: float = 0.0,
        address: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[pb.StepLog]:
        """The messages of the contract that `steps` is made of, each of several steps.

        first_step: where they begin, instead of `last_s` seconds ago; InvalidRequest if there are fewer.
        address: whose steps: one of `addresses`; "": the first one's.
        """
        request = requests.steps_request(last_s, first_step)
        return self._schedulers.stream(
            lambda one: one.scheduler.WatchSteps, request, timeout_s, lambda reply: (reply.log,), address
        )
