"""Adapters that the executor under test can load, and sequences that have them."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import FULL, NONE, Executor, Sequence, Session


class Adapters:
    """Loads adapters from the executor's directory, and unloads at the end what it has loaded."""

    def __init__(self, executor: Executor, paths: tuple[str, ...]) -> None:
        """`paths`: directories of different adapters below the executor's adapter directory."""
        self._executor, self.paths = executor, paths
        self._loaded: list[str] = []

    def load(self, path: str, name: str = "") -> pb.Adapter:
        """LoadAdapter, under a name of the kit's own if none is given. Raises grpc.RpcError."""
        name = name or f"conformance.{path.replace('/', '-')}"
        request = pb.LoadAdapterRequest(name=name, path=path)
        adapter: pb.Adapter = self._executor.call("LoadAdapter", request).adapter
        self._loaded.append(name)
        return adapter

    def load_all(self) -> list[bytes]:
        """The fingerprints of all adapters, loaded."""
        return [self.load(path).fingerprint for path in self.paths]

    def unload(self, name: str) -> bool:
        """UnloadAdapter; whether it was loaded."""
        request = pb.UnloadAdapterRequest(name=name)
        unloaded: bool = self._executor.call("UnloadAdapter", request).unloaded
        return unloaded

    def listed(self) -> dict[str, pb.Adapter]:
        """ListAdapters, by name."""
        adapters = self._executor.call("ListAdapters", pb.ListAdaptersRequest()).adapters
        assert [adapter.name for adapter in adapters] == sorted(adapter.name for adapter in adapters)
        return {adapter.name: adapter for adapter in adapters}

    def status(self) -> pb.AdapterStatus:
        """The counters."""
        return self._executor.status().adapters

    def close(self) -> None:
        """Unload all that was loaded here."""
        for name in self._loaded:
            self.unload(name)


def adapted(session: Session, tokens: Tokens[int], adapter: bytes) -> Sequence:
    """A sequence with an adapter whose prompt is cached, and that has sampled nothing."""
    return session.open(tokens, adapter=adapter, output=NONE)


def logits_behind(sequences: Tokens[Sequence], tokens: Tokens[int]) -> NDArray[np.float32]:
    """Feed the same tokens to all sequences in the same steps: [sequences, tokens, vocabulary]."""
    steps = []
    for token in tokens:
        rows = [sequence.row(tokens=[token], output=FULL) for sequence in sequences]
        answers = sequences[0].session.step(rows).rows
        for sequence, row, answer in zip(sequences, rows, answers, strict=True):
            sequence.took(row, answer)
        steps.append([answer.logits[0] for answer in answers])
    return np.array(steps).swapaxes(0, 1)
