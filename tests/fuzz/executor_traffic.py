"""Hostile executor requests: nonsense, and valid steps with a few fields disturbed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import grpc
from google.protobuf.message import Message
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc

from tests.fuzz import adapter_traffic
from tests.fuzz.messages import disturb

_TOKEN_RPCS = ["UnifiedDecode"] * 7 + ["Prefill", "BatchPrefill", "Decode", "BatchDecode", "ForwardVerify"]
# Drain is left out: it would end the target. Warmup takes no input.
_OTHER_RPCS = [
    "OpenSession",
    "CloseSession",
    "GetStatus",
    "TruncateKv",
    "ReleaseCache",
    "ForkCache",
    "Forward",
    "CheckGrammar",
]


class Hostile:
    """Builds requests around a handful of caches that it really opens, so that some get deep."""

    def __init__(
        self, stub: rpc.ExecutorServiceStub, vocab_size: int, seed: int, *, adapters: bool = False
    ) -> None:
        """adapters: also load and unload them, and open caches with them."""
        self._stub = stub
        self._adapters = adapters
        self._fingerprints = [b""]  # of adapters that were loaded, now or once
        self._vocab = vocab_size
        self._rng = random.Random(seed)
        self._next = 1
        self._live: dict[int, int] = {}  # cache id to the KV length that we think it has
        opened = stub.OpenSession(pb.OpenSessionRequest(label="hostile", lease_ms=600_000))
        self.session_id = opened.session_id
        self.codes: Counter[str] = Counter()

    def _step(self) -> pb.Step:
        rng, step = self._rng, pb.Step(header=pb.StepHeader(session_id=self.session_id))
        for cache_id, length in rng.sample(
            sorted(self._live.items()), min(len(self._live), rng.randrange(4))
        ):
            step.rows.cache_ids.append(cache_id)
            step.rows.kv_lengths.append(length)
            drafts = rng.choice([0, 0, 1, 4])
            step.rows.draft_counts.append(drafts)
            step.rows.drafts.extend(rng.randrange(self._vocab) for _ in range(drafts))
        for _ in range(rng.randrange(3) if step.rows.cache_ids else 2):
            tokens = [rng.randrange(self._vocab) for _ in range(rng.choice([1, 5, 16, 33]))]
            opening = step.openings.add(cache_id=self._next, tokens=tokens)
            opening.adapter = rng.choice(self._fingerprints)
            if len(tokens) > 1 and rng.random() < 0.2:
                opening.scored_from = rng.randrange(1, len(tokens))
            if rng.random() < 0.1:
                opening.output, opening.pooling = pb.OUTPUT_MODE_HIDDEN, rng.choice(pb.Pooling.values())
            self._next += 1
        return step

    def _requests(self) -> Iterator[tuple[str, Message]]:
        rng = self._rng
        while True:
            rate = rng.choice([0.0, 0.01, 0.03, 0.1, 0.3])
            if rng.random() < 0.7:
                name = rng.choice(_TOKEN_RPCS)
                message: Message = getattr(pb, f"{name}Request")(step=self._step())
            elif self._adapters and rng.random() < 0.5:
                yield adapter_traffic.request(rng, pb)
                continue
            else:
                name = rng.choice(_OTHER_RPCS)
                message = getattr(pb, f"{name}Request")()
                rate = max(rate, 0.3)
            disturb(rng, message, rate)
            if name == "CloseSession" and message.session_id == self.session_id:  # type: ignore[attr-defined]
                continue
            yield name, message

    def run(self, count: int) -> None:
        """Send `count` requests one after another; every status code is counted."""
        requests = self._requests()
        for _ in range(count):
            name, message = next(requests)
            try:
                reply = getattr(self._stub, name)(message, timeout=30)
            except grpc.RpcError as error:
                self.codes[error.code().name] += 1
                continue
            self.codes["OK"] += 1
            if name in _TOKEN_RPCS:
                self._learn(message.step, reply.result)  # type: ignore[attr-defined]
            if name == "LoadAdapter" and reply.adapter.fingerprint not in self._fingerprints:
                self._fingerprints.append(reply.adapter.fingerprint)
            if len(self._live) > 12:
                self._stub.ReleaseCache(self._release(list(self._live)[:8]))

    def _learn(self, step: pb.Step, result: pb.StepResult) -> None:
        if step.header.session_id != self.session_id:
            return
        failed = {error.index for error in result.rows.errors}
        for error in result.rows.errors:
            self.codes[f"row {error.code}"] += 1
        ids = [*step.rows.cache_ids, *(opening.cache_id for opening in step.openings)]
        for index, cache_id in enumerate(ids):
            if index not in failed:
                self._live[cache_id] = result.rows.kv_lengths[index]

    def _release(self, ids: list[int]) -> pb.ReleaseCacheRequest:
        for cache_id in ids:
            del self._live[cache_id]
        header = pb.StepHeader(session_id=self.session_id)
        return pb.ReleaseCacheRequest(header=header, release=pb.Release(cache_ids=ids))

    def close(self) -> None:
        """Give back everything."""
        self._stub.CloseSession(pb.CloseSessionRequest(session_id=self.session_id))
