"""`GrammarSteps`: counts what a scheduler's steps do to sequences with a grammar."""

from __future__ import annotations

from collections import Counter

from paceline.executor.v1 import executor_pb2 as pb

from tests.support.altering_proxy import AlteringProxy

NAMES = {
    "chunks": "rows and openings that compute a part of what is known",
    "forks": "caches copied",
    "replays": "caches opened with output",
    "two in flight": "steps sent behind an unanswered one, both with such sequences",
    "ahead": "rows of a sequence sent behind an unanswered one of the same",
}


class GrammarSteps:
    """Watches a proxy's steps. `counts`: see `NAMES`."""

    def __init__(self, proxy: AlteringProxy) -> None:
        self.counts: Counter[str] = Counter()
        self._session = 0
        self._caches: set[int] = set()  # of sequences with a grammar
        self._unanswered: dict[int, set[int]] = {}  # their rows and openings, by step id
        proxy.watch = self._sent
        proxy.alteration = self._answered

    def _sent(self, request: bytes) -> None:
        step = pb.StreamUnifiedDecodeRequest.FromString(request).step
        if step.header.session_id != self._session:
            self._session = step.header.session_id
            self._caches.clear()
            self._unanswered.clear()
        for opening in step.openings:
            if opening.sampling.HasField("grammar"):
                self._caches.add(opening.cache_id)
                known = len(opening.tokens) or len(opening.packed_tokens) // 4
                self.counts["chunks"] += 0 < opening.limit < known
                self.counts["replays"] += 0 < opening.prompt_length < known
        for op in step.ops:
            if op.WhichOneof("op") == "fork" and op.fork.sampling.HasField("grammar"):
                self._caches.add(op.fork.cache_id)
                self.counts["forks"] += 1
        rows, limits = step.rows.cache_ids, step.rows.limits
        ahead = set().union(*self._unanswered.values())
        for place, cache_id in enumerate(rows):
            if cache_id in self._caches:
                self.counts["chunks"] += bool(limits and limits[place])
                self.counts["ahead"] += cache_id in ahead
        constrained = self._caches & {*rows, *(opening.cache_id for opening in step.openings)}
        self.counts["two in flight"] += bool(constrained and ahead)
        self._unanswered[step.header.step_id] = constrained

    def _answered(self, rpc: str, reply: bytes) -> list[bytes]:
        if rpc == "StreamUnifiedDecode":
            self._unanswered.pop(pb.StreamUnifiedDecodeResponse.FromString(reply).result.step_id, None)
        return [reply]
